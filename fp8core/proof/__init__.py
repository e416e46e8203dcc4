"""What proves, counts and watches FP8 training; the library trains without it, and asks it only for the text of a refusal.

    verify            a step is run, and each FP8 product of it compared with float64
    audit             each weight that multiplies, whether in FP8, and why not; `expert_rows`, `other_weights` are its rows
    flops             matrix products of a step by owner, dtype and pass
    watcher           what casts do to each tensor of a training step; `cast_stats` takes the figures, `cast_records` hands them on
    profiled_gemms    FP8 GEMMs by the names of their kernels
    wire              what collectives are given, by dtype
    adders            a model of how FP8 units add up, by which `verify` bounds rows on a GPU

Users take these by the names of `fp8core`, which imports them at their first use. Whatever looks into a pass attaches itself
to `fp8core.observers`.
"""
