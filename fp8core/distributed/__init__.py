"""FP8 across processes: what travels in FP8, and the scales that all ranks must agree on.

    fsdp            FSDP2 gathers weights as FP8 codes
    weight_scales   the scales of all sharded weights of a model, by one fused amax and one all-reduce
    wire            counts what collectives are given, by dtype

Nothing here is needed to train on one device.
"""
