//! Asks NVIDIA's kernel module which processes hold memory of a GPU, with or without a context.
//!
//! NVML lists the processes that have a channel on the GPU, which comes with a CUDA context.
//! `cuMemCreate` needs no context, so a process can hold memory without being listed. The kernel
//! module's resource manager reports such memory. `GPU_GET_PIDS` for the class of subdevices lists
//! "PIDs with or without GPU contexts". `GPU_GET_PID_INFO` reports the bytes of each process
//! (`ctrl/ctrl2080/ctrl2080gpu.h` in NVIDIA/open-gpu-kernel-modules). Neither needs a privilege.
//!
//! The commands are no stable interface. The kernel module refuses parameters of another size. The
//! agent opens a subdevice to ask, so it accepts an answer only if its own process is listed.
//! Without an answer the audit relies on mapped device nodes (`enforcement/audit/compare.rs`).

use std::collections::BTreeMap;
use std::path::Path;

use bursar_ledger::units::{Bytes, GpuUuid};

use crate::rm::{CONTROL_NODE, RmClient, RmError, RmParams, SUBDEVICE, SUBDEVICE_HANDLE};

/// `NV2080_CTRL_CMD_GPU_GET_PIDS` and `NV2080_CTRL_CMD_GPU_GET_PID_INFO`.
const GET_PIDS: u32 = 0x2080_018d;
const GET_PID_INFO: u32 = 0x2080_018e;

/// `NV2080_CTRL_GPU_GET_PIDS_MAX_COUNT` and `NV2080_CTRL_GPU_GET_PID_INFO_MAX_COUNT`.
const MAX_PIDS: usize = 950;
const MAX_INFOS: usize = 200;

/// Why the kernel module gave no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HoldersError {
    /// The kernel module did not answer.
    #[error(transparent)]
    Rm(#[from] RmError),
    /// The answer is full, so that processes may be missing: a tenant may have many clients.
    #[error("the kernel module lists {MAX_PIDS} processes, and maybe not all")]
    Incomplete,
    /// The answer does not list this process, so its layout is unknown.
    #[error("the kernel module's answer has another layout than {GET_PIDS:#x} had")]
    UnknownLayout,
}

/// `NV2080_CTRL_GPU_GET_PIDS_PARAMS`.
#[repr(C)]
struct Pids {
    by_class: u32,
    class: u32,
    count: u32,
    pids: [u32; MAX_PIDS],
}

/// `NV2080_CTRL_GPU_GET_PID_INFO_PARAMS`.
#[repr(C)]
struct PidInfos {
    count: u32,
    infos: [PidInfo; MAX_INFOS],
}

/// `NV2080_CTRL_GPU_PID_INFO`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PidInfo {
    pid: u32,
    kind: u32,
    status: u32,
    private: u64,
    shared_owned: u64,
    shared_imported: u64,
    protected: [u64; 3],
    instance: [u32; 2],
}

#[expect(unsafe_code, reason = "the kernel module writes into these values")]
mod layouts {
    use super::{PidInfos, Pids, RmParams};

    // SAFETY: integers alone, in the header's order.
    unsafe impl RmParams for Pids {}
    // SAFETY: integers alone, in the header's order.
    unsafe impl RmParams for PidInfos {}
}

/// The memory of a GPU that processes hold, by pid in this process's pid namespace. Processes with
/// none are left out.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Holders {
    /// The bytes that each process owns.
    pub(crate) owned: BTreeMap<u32, Bytes>,
    /// The bytes that each process has imported from another one, once for each import.
    pub(crate) imported: BTreeMap<u32, Bytes>,
}

/// The holders of `gpu`. The call may block as long as the driver does.
///
/// # Errors
/// When the kernel module does not answer, not for all processes, or not in the known layout.
pub(crate) fn query_holders(gpu: &GpuUuid) -> Result<Holders, HoldersError> {
    let client = RmClient::open(Path::new(CONTROL_NODE), gpu)?;
    let pids = client.query_pids()?;
    let mut holders = Holders::default();
    for pids in pids.chunks(MAX_INFOS) {
        holders.add(&*client.query_infos(pids)?);
    }
    Ok(holders)
}

impl Holders {
    fn add(&mut self, answer: &PidInfos) {
        let infos = answer.infos.iter().take(answer.count as usize);
        for info in infos.filter(|info| info.status == 0) {
            let owned = info.private.saturating_add(info.shared_owned);
            let kinds = [
                (&mut self.owned, owned),
                (&mut self.imported, info.shared_imported),
            ];
            for (of, bytes) in kinds.into_iter().filter(|(_, bytes)| *bytes > 0) {
                of.insert(info.pid, Bytes(bytes));
            }
        }
    }
}

impl RmClient {
    /// The processes that opened this GPU, this process included.
    fn query_pids(&self) -> Result<Vec<u32>, HoldersError> {
        let mut pids = Box::new(Pids {
            by_class: 0,
            class: SUBDEVICE,
            count: 0,
            pids: [0; MAX_PIDS],
        });
        self.control(SUBDEVICE_HANDLE, GET_PIDS, &mut *pids)?;
        parse_pids(&pids, std::process::id())
    }

    fn query_infos(&self, pids: &[u32]) -> Result<Box<PidInfos>, HoldersError> {
        let mut infos = Box::new(PidInfos {
            count: 0,
            infos: [PidInfo::default(); MAX_INFOS],
        });
        for (info, pid) in infos.infos.iter_mut().zip(pids) {
            info.pid = *pid;
            infos.count += 1;
        }
        self.control(SUBDEVICE_HANDLE, GET_PID_INFO, &mut *infos)?;
        Ok(infos)
    }
}

/// The processes of an answer, which has to list `own`.
fn parse_pids(answer: &Pids, own: u32) -> Result<Vec<u32>, HoldersError> {
    let pids = usize::try_from(answer.count).ok();
    let pids = pids.and_then(|count| answer.pids.get(..count));
    match pids {
        Some(pids) if pids.len() == MAX_PIDS => Err(HoldersError::Incomplete),
        Some(pids) if pids.contains(&own) => Ok(pids.to_vec()),
        _ => Err(HoldersError::UnknownLayout),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_have_the_kernel_modules_sizes() {
        assert_eq!(size_of::<Pids>(), 12 + 4 * 950);
        assert_eq!(size_of::<PidInfo>(), 72);
        assert_eq!(size_of::<PidInfos>(), 8 + 72 * 200);
    }

    fn pids(of: &[u32]) -> Pids {
        let mut pids = [0; MAX_PIDS];
        pids[..of.len()].copy_from_slice(of);
        Pids {
            by_class: 0,
            class: SUBDEVICE,
            count: of.len() as u32,
            pids,
        }
    }

    #[test]
    fn answer_is_believed_only_when_it_lists_the_asker() {
        assert_eq!(parse_pids(&pids(&[7, 9]), 9).unwrap(), [7, 9]);
        let is_unknown = |answer| matches!(answer, Err(HoldersError::UnknownLayout));
        assert!(is_unknown(parse_pids(&pids(&[7]), 9)));
        let mut beyond = pids(&[9]);
        beyond.count = MAX_PIDS as u32 + 1;
        assert!(is_unknown(parse_pids(&beyond, 9)));
    }

    #[test]
    fn answer_that_is_full_is_no_answer() {
        let all: Vec<u32> = (1..=MAX_PIDS as u32).collect();
        let full = parse_pids(&pids(&all), 9);
        assert!(matches!(full, Err(HoldersError::Incomplete)));
        assert_eq!(parse_pids(&pids(&all[1..]), 9).unwrap(), all[1..]);
    }

    #[test]
    fn imported_memory_is_apart_from_owned() {
        let info = |pid, status, [private, shared_owned, shared_imported]: [u64; 3]| PidInfo {
            pid,
            status,
            private,
            shared_owned,
            shared_imported,
            ..PidInfo::default()
        };
        let mut answer = PidInfos {
            count: 4,
            infos: [PidInfo::default(); MAX_INFOS],
        };
        answer.infos[0] = info(1, 0, [5, 6, 7]);
        answer.infos[1] = info(2, 0, [0, 0, 7]);
        answer.infos[2] = info(3, 0x57, [5, 0, 0]);
        answer.infos[3] = info(4, 0, [5, 0, 0]);
        answer.infos[4] = info(5, 0, [5, 0, 0]);
        let mut holders = Holders::default();
        holders.add(&answer);
        let expected = Holders {
            owned: [(1, Bytes(11)), (4, Bytes(5))].into(),
            imported: [(1, Bytes(7)), (2, Bytes(7))].into(),
        };
        assert_eq!(holders, expected);
    }

    #[test]
    fn no_answer_comes_without_the_kernel_module() {
        if Path::new(CONTROL_NODE).exists() {
            return;
        }
        let gpu = "GPU-00000000-0000-0000-0000-000000000000".parse().unwrap();
        assert!(matches!(
            query_holders(&gpu),
            Err(HoldersError::Rm(RmError::Open(..)))
        ));
    }
}
