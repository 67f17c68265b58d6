//! Makes `cuInit` fail or hang in processes that see a GPU, while NVML answers about it.
//!
//! A file for each such unit has the `CUresult`, or the word `hang`.

use crate::sim::{HANG_POLL_INTERVAL, Sim};
use std::io;
use std::str::FromStr;

/// A fault of `cuInit`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InitFault {
    /// The call fails with this `CUresult`.
    Code(i32),
    /// The call returns once the fault is cleared.
    Hang,
}

impl FromStr for InitFault {
    type Err = String;

    fn from_str(text: &str) -> Result<InitFault, String> {
        match (text, text.parse()) {
            ("hang", _) => Ok(InitFault::Hang),
            (_, Ok(code)) if code > 0 => Ok(InitFault::Code(code)),
            _ => Err(format!("`{text}` is neither `hang` nor an error of CUDA's")),
        }
    }
}

/// Sets the fault of a unit, or clears it.
///
/// # Errors
/// The file cannot be written or removed.
pub fn set(sim: &Sim, unit: usize, fault: Option<InitFault>) -> io::Result<()> {
    let path = sim.folder.init_fault(unit);
    let text = match fault {
        Some(InitFault::Code(code)) => code.to_string(),
        Some(InitFault::Hang) => "hang".to_owned(),
        None => {
            return match std::fs::remove_file(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                removed => removed,
            };
        }
    };
    // A rename shows readers the whole text.
    let fresh = path.with_extension("new");
    std::fs::write(&fresh, text)?;
    std::fs::rename(fresh, path)
}

/// Returns the `CUresult` with which `cuInit` fails because of a unit. Blocks while it hangs.
pub fn check(sim: &Sim, unit: usize) -> Option<i32> {
    loop {
        let text = std::fs::read_to_string(sim.folder.init_fault(unit)).ok()?;
        match text.parse().ok()? {
            InitFault::Code(code) => return Some(code),
            InitFault::Hang => std::thread::sleep(HANG_POLL_INTERVAL),
        }
    }
}
