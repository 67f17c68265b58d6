//! Which XIDs say that a whole GPU is sick.
//!
//! Source: NVIDIA's XID catalogue (<https://docs.nvidia.com/deploy/xid-errors/>), column "immediate
//! action": what asks for a reset of the GPU or of the machine is [`Verdict::Gpu`]. What ends one
//! application ([`Verdict::Application`]) leaves the GPU to the others; an XID that this table does not
//! know is taken for the application's too, for a healthy GPU that is not offered helps nobody and
//! the probes find one that is truly gone.

/// What an XID says about the GPU that it came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The GPU needs a reset, or is gone: no new pod should get it.
    Gpu,
    /// One program did wrong or was hit; the GPU goes on.
    Application,
}

/// XIDs whose remedy is a reset of the GPU or a restart of the machine, ascending.
const OF_THE_GPU: &[u64] = &[
    46,  // GPU stopped processing
    48,  // double bit ECC error
    62,  // internal micro-controller halt
    64,  // row remapping or page retirement failed
    74,  // NVLink error
    79,  // GPU has fallen off the bus
    95,  // uncontained ECC error
    110, // security fault
    119, // GSP RPC timeout
    120, // GSP error
    140, // unrecovered ECC error
    143, // GPU initialisation failed
    158, // GPU fatal timeout
];

/// The verdict on XID `code`.
pub fn verdict(code: u64) -> Verdict {
    if OF_THE_GPU.binary_search(&code).is_ok() {
        Verdict::Gpu
    } else {
        Verdict::Application
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_ascending_so_that_the_search_finds_every_row() {
        assert!(OF_THE_GPU.is_sorted());
    }

    #[test]
    fn a_fault_of_one_program_does_not_condemn_the_gpu() {
        for code in [13, 31, 43, 45, 68, 94, 109] {
            assert_eq!(verdict(code), Verdict::Application, "xid {code}");
        }
    }

    #[test]
    fn a_gpu_off_the_bus_or_with_uncontained_memory_errors_is_sick() {
        for code in [48, 79, 95, 119] {
            assert_eq!(verdict(code), Verdict::Gpu, "xid {code}");
        }
    }
}
