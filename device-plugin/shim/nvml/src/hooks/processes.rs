//! Lists the container's own processes as the processes of a device.
//!
//! All of them are compute processes: a container has no graphics libraries, and no MPS server.

use bursar_protocol::messages::ProcessUsage;

use super::{Device, HookResult, check_count_query, deref, driver, guarded, usage, uuid};
use crate::nvml_return::{self, NvmlReturn};

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProcessInfoV1 {
    pid: u32,
    bytes: u64,
}

/// `nvmlProcessInfo_v2_t`, which version 3 of the calls uses too.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProcessInfoV2 {
    pid: u32,
    bytes: u64,
    instance: MigInstance,
}

/// `nvmlProcessDetail_v1_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProcessDetail {
    pid: u32,
    bytes: u64,
    instance: MigInstance,
    /// Protected memory is not counted separately.
    protected: u64,
}

/// `nvmlProcessDetailList_v1_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ProcessDetailList {
    version: u32,
    mode: u32,
    count: u32,
    entries: *mut ProcessDetail,
}

const PROCESS_DETAIL_LIST_V1: u32 = size_of::<ProcessDetailList>() as u32 | 1 << 24;

/// `nvmlProcessMode_t`: processes with a compute context, and all.
const MODE_COMPUTE: u32 = 0;
const MODE_ALL: u32 = 3;

/// The MIG instance that a process runs in.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MigInstance {
    gpu: u32,
    compute: u32,
}

/// The id that NVML writes without MIG.
const NO_INSTANCE: MigInstance = MigInstance {
    gpu: u32::MAX,
    compute: u32::MAX,
};

fn instance(device: Device) -> Result<MigInstance, NvmlReturn> {
    if !uuid(device)?.starts_with("MIG-") {
        return Ok(NO_INSTANCE);
    }
    let MigInstance {
        mut gpu,
        mut compute,
    } = NO_INSTANCE;
    // An instance that was just destroyed keeps these values.
    let _ = driver!(nvmlDeviceGetGpuInstanceId(device => Device, &raw mut gpu => *mut u32));
    let _ = driver!(nvmlDeviceGetComputeInstanceId(device => Device, &raw mut compute => *mut u32));
    Ok(MigInstance { gpu, compute })
}

/// A structure of NVML for a process.
trait ProcessRow: Copy {
    fn new(process: &ProcessUsage, instance: MigInstance) -> Self;
}

impl ProcessRow for ProcessInfoV1 {
    fn new(&ProcessUsage { pid, bytes }: &ProcessUsage, _: MigInstance) -> ProcessInfoV1 {
        ProcessInfoV1 { pid, bytes }
    }
}

impl ProcessRow for ProcessInfoV2 {
    fn new(&ProcessUsage { pid, bytes }: &ProcessUsage, instance: MigInstance) -> ProcessInfoV2 {
        ProcessInfoV2 {
            pid,
            bytes,
            instance,
        }
    }
}

impl ProcessRow for ProcessDetail {
    fn new(&ProcessUsage { pid, bytes }: &ProcessUsage, instance: MigInstance) -> ProcessDetail {
        ProcessDetail {
            pid,
            bytes,
            instance,
            protected: 0,
        }
    }
}

fn compute_processes<T: ProcessRow>(device: Device) -> Result<Vec<T>, NvmlReturn> {
    let (usage, instance) = (usage(device)?, instance(device)?);
    let rows = usage.processes.iter();
    Ok(rows.map(|process| T::new(process, instance)).collect())
}

fn no_processes<T>(_: Device) -> Result<Vec<T>, NvmlReturn> {
    Ok(Vec::new())
}

/// Writes rows into a caller's buffer of `count` places, or reports how many are needed.
fn write_rows<T: Copy>(rows: &[T], count: &mut u32, places: *mut T) -> HookResult {
    let needed = u32::try_from(rows.len()).map_err(|_| nvml_return::UNKNOWN)?;
    let room = std::mem::replace(count, needed);
    if needed > room {
        return Err(nvml_return::INSUFFICIENT_SIZE);
    }
    if needed > 0 {
        deref(places)?;
        // SAFETY: by the function's contract there is space for `room` structures, no fewer than
        // these.
        unsafe { std::ptr::copy_nonoverlapping(rows.as_ptr(), places, rows.len()) };
    }
    Ok(())
}

/// Declares functions that list processes: a count, and a buffer for so many.
macro_rules! lists {
    ($($name:ident: $query:ident, $row:ty;)*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name(device: Device, count: *mut u32, places: *mut $row) -> NvmlReturn {
                guarded(|| {
                    let (count, mut none) = (deref(count)?, 0);
                    check_count_query(driver!($name(
                        device => Device,
                        &raw mut none => *mut u32,
                        std::ptr::null_mut() => *mut $row,
                    )))?;
                    write_rows(&$query::<$row>(device)?, count, places)
                })
            }
        )*
    };
}

lists! {
    nvmlDeviceGetComputeRunningProcesses: compute_processes, ProcessInfoV1;
    nvmlDeviceGetComputeRunningProcesses_v2: compute_processes, ProcessInfoV2;
    nvmlDeviceGetComputeRunningProcesses_v3: compute_processes, ProcessInfoV2;
    nvmlDeviceGetGraphicsRunningProcesses: no_processes, ProcessInfoV1;
    nvmlDeviceGetGraphicsRunningProcesses_v2: no_processes, ProcessInfoV2;
    nvmlDeviceGetGraphicsRunningProcesses_v3: no_processes, ProcessInfoV2;
    nvmlDeviceGetMPSComputeRunningProcesses: no_processes, ProcessInfoV1;
    nvmlDeviceGetMPSComputeRunningProcesses_v2: no_processes, ProcessInfoV2;
    nvmlDeviceGetMPSComputeRunningProcesses_v3: no_processes, ProcessInfoV2;
    nvmlDeviceGetEncoderSessions: no_processes, SessionInfo;
    nvmlDeviceGetFBCSessions: no_processes, SessionInfo;
}

/// The first byte of `nvmlEncoderSessionInfo_t` or `nvmlFBCSessionInfo_t`. The real lists have
/// other containers' pids, and this container has no library that opens a session.
type SessionInfo = u8;

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetRunningProcessDetailList(
    device: Device,
    list: *mut ProcessDetailList,
) -> NvmlReturn {
    guarded(|| {
        let list = deref(list)?;
        if list.version != PROCESS_DETAIL_LIST_V1 {
            return Err(nvml_return::ARGUMENT_VERSION_MISMATCH);
        }
        let mut none = ProcessDetailList {
            count: 0,
            entries: std::ptr::null_mut(),
            ..*list
        };
        check_count_query(driver!(nvmlDeviceGetRunningProcessDetailList(
            device => Device,
            &raw mut none => *mut ProcessDetailList,
        )))?;
        let rows = match list.mode {
            MODE_COMPUTE | MODE_ALL => compute_processes(device)?,
            _ => no_processes(device)?,
        };
        write_rows(&rows, &mut list.count, list.entries)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_rows_reports_the_count_when_the_buffer_is_too_small() {
        let (mut places, mut count) = ([7, 7, 7], 2);
        assert_eq!(
            write_rows(&[1, 2, 3], &mut count, places.as_mut_ptr()),
            Err(nvml_return::INSUFFICIENT_SIZE)
        );
        assert_eq!((places, count), ([7; 3], 3));
        assert_eq!(write_rows(&[1, 2], &mut count, places.as_mut_ptr()), Ok(()));
        assert_eq!((places, count), ([1, 2, 7], 2));
    }

    #[test]
    fn write_rows_needs_no_buffer_when_it_reports_the_count() {
        let mut count = 0;
        let nowhere = std::ptr::null_mut();
        assert_eq!(
            write_rows(&[1], &mut count, nowhere),
            Err(nvml_return::INSUFFICIENT_SIZE)
        );
        assert_eq!(
            write_rows(&[1], &mut count, nowhere),
            Err(nvml_return::INVALID_ARGUMENT)
        );
        assert_eq!(write_rows::<u32>(&[], &mut count, nowhere), Ok(()));
        assert_eq!(count, 0);
    }

    #[test]
    fn structures_have_the_headers_sizes() {
        let sizes = [
            size_of::<ProcessInfoV1>(),
            size_of::<ProcessInfoV2>(),
            size_of::<ProcessDetail>(),
            size_of::<ProcessDetailList>(),
        ];
        assert_eq!(sizes, [16, 24, 32, 24]);
    }
}
