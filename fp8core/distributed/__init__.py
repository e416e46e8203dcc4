"""FP8 across processes: what travels in FP8, and the scales that all ranks must agree on.

    fsdp              FSDP2 gathers weights as FP8 codes: start here
    weight_shard      the tensor that FSDP2 sends
    weight_gather     how a weight is gathered, and why in high precision
    weight_scales     the scales of all sharded weights of a model, by one fused amax and one all-reduce
    fsdp_state        the few things of FSDP2's and DDP's that are not in their public interface
    sequence_parallel activations and gradients are gathered as FP8 codes
    waited            outputs of collectives that compiled modules read
    tensor_parallel   the styles of `torch.distributed.tensor.parallel` for Float8Linear
    expert_parallel   experts shared out over ranks: tokens travel to them and back

Nothing here is needed to train on one device.
"""
