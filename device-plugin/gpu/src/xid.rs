//! Lists the remedy of each XID: none, or a restart of the program, the GPU or the machine.
//!
//! Source: NVIDIA's XID catalogue
//! (<https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html>), column "immediate
//! action" (RESTART_APP, RESET_GPU and WORKFLOW_XID_48, RESTART_BM and RESTART_VM, the NVLink
//! workflows). XID 154 only announces the remedy of another XID and is reported again after it, so
//! it has no remedy of its own. XIDs outside the table are ignored: the probes find a GPU that is
//! lost, and a healthy GPU should stay in use.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use bursar_ledger::BootTime;

use super::pci::PciAddress;

/// The remedy that an XID needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XidAction {
    /// No remedy, or none outside the driver.
    Ignore,
    /// A restart of one program, which caused the fault or was hit by it; the GPU stays healthy.
    RestartApplication,
    /// A check of a link, which may recover: new pods wait until the GPU has been healthy for a
    /// while.
    Transient,
    /// A reset of the GPU: until then it gets no new pod, and its programs have to end.
    ResetGpu,
    /// A restart of the machine; until then the GPU is treated as for [`XidAction::ResetGpu`].
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

/// Further XIDs that name a process whose context is lost: the driver ended its channels.
const FOLLOWED_BY_LOSS: &[u32] = &[
    43,  // GPU stopped processing
    45,  // preemptive clean-up, due to previous errors
    109, // context switch timeout
];

fn is_in(codes: Codes, code: u32) -> bool {
    codes.iter().any(|codes| codes.contains(&code))
}

/// The remedy of XID `code`.
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

/// Whether the process that XID `code` names has lost a context.
pub fn loses_context(code: u32) -> bool {
    is_in(APPLICATION, code) || FOLLOWED_BY_LOSS.contains(&code)
}

/// For how long an XID that NVML reported is remembered.
const RETENTION: Duration = Duration::from_secs(60);

/// The times at which NVML last reported each XID of each physical GPU, for [`RETENTION`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecentXids(BTreeMap<(PciAddress, u64), BootTime>);

impl RecentXids {
    /// Records a report of NVML.
    pub fn record(&mut self, gpu: PciAddress, code: u64, now: BootTime) {
        self.0.retain(|_, then| now.since(*then) <= RETENTION);
        self.0.insert((gpu, code), now);
    }

    /// The time of NVML's last report of this XID.
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
