//! Which XIDs say that a whole GPU is sick.
//!
//! Source: NVIDIA's XID catalogue (<https://docs.nvidia.com/deploy/xid-errors/>), column "immediate
//! action": what asks for a reset of the GPU or of the machine is [`Verdict::Reset`]; what asks for a look at
//! a link, which may mend itself, is [`Verdict::Transient`]. XID 154 only announces what another one of the
//! table asks for, and comes again when that is done: it says nothing by itself. What ends one
//! application ([`Verdict::Application`]) leaves the GPU to the others; an XID that this table does not
//! know is taken for the application's too, for a healthy GPU that is not offered helps nobody and
//! the probes find one that is truly gone.

/// What an XID says about the GPU that it came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Only a reset or a reboot cures it: no new pod gets the GPU before.
    Reset,
    /// No new pod gets the GPU until it has been well for a while.
    Transient,
    /// One program did wrong or was hit; the GPU goes on.
    Application,
}

/// XIDs whose remedy is a reset of the GPU or a restart of the machine, ascending.
const RESET: &[u64] = &[
    46,  // GPU stopped processing
    48,  // double bit ECC error
    62,  // internal micro-controller halt
    64,  // row remapping or page retirement failed
    79,  // GPU has fallen off the bus
    95,  // uncontained ECC error
    110, // security fault
    119, // GSP RPC timeout
    120, // GSP error
    140, // unrecovered ECC error
    143, // GPU initialisation failed
    158, // GPU fatal timeout
];

/// XIDs of the whole GPU that may pass, ascending.
const TRANSIENT: &[u64] = &[
    74, // NVLink error
];

/// The verdict on XID `code`.
pub fn verdict(code: u64) -> Verdict {
    if RESET.binary_search(&code).is_ok() {
        Verdict::Reset
    } else if TRANSIENT.binary_search(&code).is_ok() {
        Verdict::Transient
    } else {
        Verdict::Application
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_are_ascending_so_that_the_search_finds_every_row() {
        assert!(RESET.is_sorted() && TRANSIENT.is_sorted());
    }

    #[test]
    fn a_fault_of_one_program_does_not_condemn_the_gpu() {
        for code in [13, 31, 43, 45, 68, 94, 109, 154] {
            assert_eq!(verdict(code), Verdict::Application, "xid {code}");
        }
    }

    #[test]
    fn a_gpu_off_the_bus_or_with_uncontained_memory_errors_needs_a_reset_and_a_link_may_recover() {
        for code in [48, 62, 64, 79, 95, 119, 120, 140] {
            assert_eq!(verdict(code), Verdict::Reset, "xid {code}");
        }
        assert_eq!(verdict(74), Verdict::Transient);
    }
}
