"""Advice: does FP8 pay for this model on this GPU, layer by layer, predicted and, where runs exist, measured."""
