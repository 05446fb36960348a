//! Environment variables that tests set themselves or must not inherit.

/// Variables that every command of a test is started without.
pub(crate) const VARIABLES: [&str; 20] = [
    "DOORBELL_SOFT_ADDR",
    "DOORBELL_SOFT_PORT",
    "DOORBELL_FAULTS",
    "DOORBELL_PCAP",
    "DOORBELL_LINK",
    "DOORBELL_COPY",
    "DOORBELL_GPU_PATH",
    "DOORBELL_CUDA_LIBRARY",
    "DOORBELL_STORAGE_PATH",
    "DOORBELL_CUFILE_LIBRARY",
    "DOORBELL_ALGORITHM",
    "DOORBELL_PROTOCOL",
    "DOORBELL_CHANNELS",
    "DOORBELL_SLICE",
    "DOORBELL_TUNING",
    "DOORBELL_RANK",
    // Of launchers.
    "OMPI_COMM_WORLD_RANK",
    "SLURM_PROCID",
    "RANK",
    "WORLD_SIZE",
];
