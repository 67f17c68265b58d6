//! Who uses a device: the container's own processes.
//!
//! All of them are compute processes: a container has no graphics libraries, and no MPS server.

use bursar_protocol::wire::Listed;

use super::{Answer, Device, given, hooked, permitted, real, usage, uuid};
use crate::codes::{self, Code};

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process {
    pid: u32,
    bytes: u64,
}

/// `nvmlProcessInfo_v2_t`, which version 3 of the calls uses too.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProcessV2 {
    pid: u32,
    bytes: u64,
    instance: Instance,
}

/// `nvmlProcessDetail_v1_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Detail {
    pid: u32,
    bytes: u64,
    instance: Instance,
    /// Not told apart here.
    protected: u64,
}

/// `nvmlProcessDetailList_v1_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Details {
    version: u32,
    mode: u32,
    count: u32,
    places: *mut Detail,
}

const DETAILS_1: u32 = size_of::<Details>() as u32 | 1 << 24;

/// `nvmlProcessMode_t`: processes with a compute context, and all.
const COMPUTE: u32 = 0;
const ALL: u32 = 3;

/// The MIG instance that a process runs in.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Instance {
    gpu: u32,
    compute: u32,
}

/// What NVML writes where there is no MIG.
const NO_INSTANCE: Instance = Instance {
    gpu: u32::MAX,
    compute: u32::MAX,
};

fn instance(device: Device) -> Result<Instance, Code> {
    if !uuid(device)?.starts_with("MIG-") {
        return Ok(NO_INSTANCE);
    }
    let Instance {
        mut gpu,
        mut compute,
    } = NO_INSTANCE;
    // An instance that just went keeps the mark of none.
    let _ = real!(nvmlDeviceGetGpuInstanceId(device => Device, &raw mut gpu => *mut u32));
    let _ = real!(nvmlDeviceGetComputeInstanceId(device => Device, &raw mut compute => *mut u32));
    Ok(Instance { gpu, compute })
}

/// A structure of NVML for a process.
trait Row: Copy {
    fn of(process: &Listed, instance: Instance) -> Self;
}

impl Row for Process {
    fn of(&Listed { pid, bytes }: &Listed, _: Instance) -> Process {
        Process { pid, bytes }
    }
}

impl Row for ProcessV2 {
    fn of(&Listed { pid, bytes }: &Listed, instance: Instance) -> ProcessV2 {
        ProcessV2 {
            pid,
            bytes,
            instance,
        }
    }
}

impl Row for Detail {
    fn of(&Listed { pid, bytes }: &Listed, instance: Instance) -> Detail {
        Detail {
            pid,
            bytes,
            instance,
            protected: 0,
        }
    }
}

fn compute<T: Row>(device: Device) -> Result<Vec<T>, Code> {
    let (usage, instance) = (usage(device)?, instance(device)?);
    let rows = usage.processes.iter();
    Ok(rows.map(|process| T::of(process, instance)).collect())
}

fn nobody<T>(_: Device) -> Result<Vec<T>, Code> {
    Ok(Vec::new())
}

/// Fills a caller's `count` places, or says how many are needed.
fn put<T: Copy>(rows: &[T], count: &mut u32, places: *mut T) -> Answer {
    let needed = u32::try_from(rows.len()).map_err(|_| codes::UNKNOWN)?;
    let room = std::mem::replace(count, needed);
    if needed > room {
        return Err(codes::INSUFFICIENT_SIZE);
    }
    if needed > 0 {
        given(places)?;
        // SAFETY: by the function's contract there is room for `room` structures, no fewer than these.
        unsafe { std::ptr::copy_nonoverlapping(rows.as_ptr(), places, rows.len()) };
    }
    Ok(())
}

/// Functions that list processes: a count, and places for so many.
macro_rules! lists {
    ($($name:ident: $who:ident, $row:ty;)*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name(device: Device, count: *mut u32, places: *mut $row) -> Code {
                hooked(|| {
                    let (count, mut none) = (given(count)?, 0);
                    permitted(real!($name(
                        device => Device,
                        &raw mut none => *mut u32,
                        std::ptr::null_mut() => *mut $row,
                    )))?;
                    put(&$who::<$row>(device)?, count, places)
                })
            }
        )*
    };
}

lists! {
    nvmlDeviceGetComputeRunningProcesses: compute, Process;
    nvmlDeviceGetComputeRunningProcesses_v2: compute, ProcessV2;
    nvmlDeviceGetComputeRunningProcesses_v3: compute, ProcessV2;
    nvmlDeviceGetGraphicsRunningProcesses: nobody, Process;
    nvmlDeviceGetGraphicsRunningProcesses_v2: nobody, ProcessV2;
    nvmlDeviceGetGraphicsRunningProcesses_v3: nobody, ProcessV2;
    nvmlDeviceGetMPSComputeRunningProcesses: nobody, Process;
    nvmlDeviceGetMPSComputeRunningProcesses_v2: nobody, ProcessV2;
    nvmlDeviceGetMPSComputeRunningProcesses_v3: nobody, ProcessV2;
    nvmlDeviceGetEncoderSessions: nobody, Session;
    nvmlDeviceGetFBCSessions: nobody, Session;
}

/// The first byte of `nvmlEncoderSessionInfo_t` or `nvmlFBCSessionInfo_t`: other containers' pids are in them, and
/// this one has no library that would open a session.
type Session = u8;

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetRunningProcessDetailList(device: Device, list: *mut Details) -> Code {
    hooked(|| {
        let list = given(list)?;
        if list.version != DETAILS_1 {
            return Err(codes::ARGUMENT_VERSION_MISMATCH);
        }
        let mut none = Details {
            count: 0,
            places: std::ptr::null_mut(),
            ..*list
        };
        permitted(real!(nvmlDeviceGetRunningProcessDetailList(
            device => Device,
            &raw mut none => *mut Details,
        )))?;
        let rows = match list.mode {
            COMPUTE | ALL => compute(device)?,
            _ => nobody(device)?,
        };
        put(&rows, &mut list.count, list.places)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_small_a_buffer_is_left_alone_and_the_number_that_is_needed_is_told() {
        let (mut places, mut count) = ([7, 7, 7], 2);
        assert_eq!(
            put(&[1, 2, 3], &mut count, places.as_mut_ptr()),
            Err(codes::INSUFFICIENT_SIZE)
        );
        assert_eq!((places, count), ([7; 3], 3));
        assert_eq!(put(&[1, 2], &mut count, places.as_mut_ptr()), Ok(()));
        assert_eq!((places, count), ([1, 2, 7], 2));
    }

    #[test]
    fn no_places_are_needed_to_ask_how_many_there_are() {
        let mut count = 0;
        let nowhere = std::ptr::null_mut();
        assert_eq!(
            put(&[1], &mut count, nowhere),
            Err(codes::INSUFFICIENT_SIZE)
        );
        assert_eq!(put(&[1], &mut count, nowhere), Err(codes::INVALID_ARGUMENT));
        assert_eq!(put::<u32>(&[], &mut count, nowhere), Ok(()));
        assert_eq!(count, 0);
    }

    #[test]
    fn the_structures_have_the_headers_sizes() {
        let sizes = [
            size_of::<Process>(),
            size_of::<ProcessV2>(),
            size_of::<Detail>(),
            size_of::<Details>(),
        ];
        assert_eq!(sizes, [16, 24, 32, 24]);
    }
}
