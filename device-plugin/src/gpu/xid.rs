//! What each XID asks for: nothing, a restart of the program, a reset of the GPU, a restart of the machine.
//!
//! Source: NVIDIA's XID catalogue (<https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html>), column
//! "immediate action" (RESTART_APP, RESET_GPU and WORKFLOW_XID_48, RESTART_BM and RESTART_VM, the NVLink workflows).
//! XID 154 only announces what another one of the table asks for, and comes again when that is done: it says nothing
//! by itself. An XID that this table does not know asks for nothing, for a healthy GPU that is not offered helps
//! nobody and the probes find one that is truly gone.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::pci::PciAddress;
use crate::ledger::BootTime;

/// What an XID asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XidAction {
    /// Nothing, or nothing that anybody but the driver could do.
    Ignore,
    /// One program did wrong or was hit, and has to start again; the GPU goes on.
    RestartApplication,
    /// A look at a link, which may mend itself: no new pod gets the GPU until it has been well for a while.
    Transient,
    /// A reset of the GPU: no new pod gets it before, and what runs on it has to go.
    ResetGpu,
    /// A restart of the machine, in the same way.
    RestartNode,
}

type Codes = &'static [RangeInclusive<u32>];

const APPLICATION: Codes = &[
    8..=8,
    11..=11,
    13..=13, // graphics engine exception
    25..=25,
    31..=32,   // GPU memory page fault, push buffer
    39..=41,   // copy engines
    60..=60,   // video processor
    68..=72,   // video decoder, graphics engine class, copy engines
    75..=77,   // copy engines
    80..=80,   // corrupted data sent to the GPU
    82..=86,   // JPEG, video decoders, copy engine, optical flow
    88..=89,   // video decoders
    94..=94,   // contained memory error
    96..=105,  // video decoders, JPEG
    126..=135, // copy engines
    139..=139, // optical flow
];

const TRANSIENT: Codes = &[
    74..=74,   // NVLink
    144..=150, // NVLink 5
];

const RESET: Codes = &[
    46..=46,   // GPU stopped processing
    48..=48,   // double bit ECC error
    62..=62,   // internal micro-controller halt
    64..=64,   // memory remapping failed
    95..=95,   // uncontained memory error
    109..=110, // context switch timeout, security fault
    119..=120, // GSP
    136..=136, // link training failed
    140..=140, // unrecovered ECC error
    143..=143, // GPU initialisation failed
    155..=156, // NVLink, by software; a resource was retired
    158..=158, // fatal timeout
];

const NODE: Codes = &[
    79..=79,   // fell off the bus
    151..=151, // key rotation
];

/// XIDs beside the applications' that name a process whose context is lost: the driver ended its channels.
const FOLLOWED_BY_LOSS: &[u32] = &[
    43,  // GPU stopped processing
    45,  // preemptive clean-up, due to previous errors
    109, // context switch timeout
];

fn is_in(codes: Codes, code: u32) -> bool {
    codes.iter().any(|codes| codes.contains(&code))
}

/// The verdict on XID `code`.
pub fn required_action(code: u64) -> XidAction {
    let Ok(code) = u32::try_from(code) else {
        return XidAction::Ignore;
    };
    let table = [
        (NODE, XidAction::RestartNode),
        (RESET, XidAction::ResetGpu),
        (TRANSIENT, XidAction::Transient),
        (APPLICATION, XidAction::RestartApplication),
    ];
    let found = table.into_iter().find(|(codes, _)| is_in(codes, code));
    found.map_or(XidAction::Ignore, |(_, verdict)| verdict)
}

/// Whether a context of the process that XID `code` names is lost.
pub fn loses_context(code: u32) -> bool {
    is_in(APPLICATION, code) || FOLLOWED_BY_LOSS.contains(&code)
}

/// How long it is kept that NVML told of an XID.
const RETENTION: Duration = Duration::from_secs(60);

/// When NVML last told of each XID of each physical GPU, as far as that is not long ago.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecentXids(BTreeMap<(PciAddress, u64), BootTime>);

impl RecentXids {
    /// NVML tells of one.
    pub fn record(&mut self, gpu: PciAddress, code: u64, now: BootTime) {
        self.0.retain(|_, then| now.since(*then) <= RETENTION);
        self.0.insert((gpu, code), now);
    }

    /// When NVML last told of this one.
    pub fn last_reported(&self, gpu: PciAddress, code: u64) -> Option<BootTime> {
        self.0.get(&(gpu, code)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xid_is_in_at_most_one_table() {
        for code in 0..1_000 {
            let tables = [APPLICATION, TRANSIENT, RESET, NODE];
            let found = tables.iter().filter(|codes| is_in(codes, code)).count();
            assert!(found <= 1, "xid {code}");
        }
    }

    #[test]
    fn application_xid_loses_context_and_spares_gpu() {
        for code in [13, 31, 32, 39, 68, 69, 94] {
            assert_eq!(
                required_action(code),
                XidAction::RestartApplication,
                "xid {code}"
            );
        }
        for code in [13, 31, 43, 45, 94, 109] {
            assert!(loses_context(code), "xid {code}");
        }
    }

    #[test]
    fn informational_xid_is_ignored() {
        for code in [
            0,
            14,
            37,
            43,
            45,
            63,
            92,
            106,
            121,
            137,
            154,
            160,
            4_000,
            u64::MAX,
        ] {
            assert_eq!(required_action(code), XidAction::Ignore, "xid {code}");
        }
        for code in [14, 48, 63, 79, 95, 154] {
            assert!(!loses_context(code), "xid {code}");
        }
    }

    #[test]
    fn xid_action_is_that_of_the_catalogue() {
        for code in [46, 48, 62, 64, 95, 109, 119, 120, 136, 140, 143, 158] {
            assert_eq!(required_action(code), XidAction::ResetGpu, "xid {code}");
        }
        for code in [79, 151] {
            assert_eq!(required_action(code), XidAction::RestartNode, "xid {code}");
        }
        for code in [74, 144, 150] {
            assert_eq!(required_action(code), XidAction::Transient, "xid {code}");
        }
    }
}
