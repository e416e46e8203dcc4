"""Command line: words -> commands. The only room that knows Hydra."""
