"""The backend "doorbell" of torch.distributed, for tensors of the CPU.

PyTorch calls ``register`` when it is imported, by the entry point of the group ``torch.backends``
(from version 2.5 on); then ``torch.distributed.init_process_group("doorbell")`` is all there is to do.
"""


def register():
    """Registers the backend. Has no effect when called again."""
    import torch.distributed

    if torch.distributed.is_available():
        backends = torch.distributed.Backend
        if "doorbell" not in backends.backend_list:
            backends.register_backend("doorbell", _create, devices=["cpu"])


def _create(store, rank, size, timeout):
    from doorbell_rdma import _c10d

    return _c10d.create(store, rank, size, timeout)
