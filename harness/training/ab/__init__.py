"""FP8 against bf16 in a training loop of the user's own: paired by blocks of steps, without a relaunch.

Public as `from harness import ab`.
"""

from harness.training.ab.callbacks import accumulate, hugging_face_callback, lightning_callback
from harness.training.ab.result import TrialResult
from harness.training.ab.trial import Trial

__all__ = ["Trial", "TrialResult", "accumulate", "hugging_face_callback", "lightning_callback"]
