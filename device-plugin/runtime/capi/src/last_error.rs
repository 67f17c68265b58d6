//! Stores a thread's last failure: status, text and the driver's code.
//!
//! A destructor of a thread's data may call the library after the stored failure is gone. Such a
//! call gets its status, and a constant text.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};

use bursar_protocol::messages::RejectReason;
use bursar_protocol::messages::retained::RetainedRefusal;
use bursar_runtime::driver::DriverError;
use bursar_runtime::error::CudaError;
use bursar_runtime::memory::gpu_token::{TokenError, TokenRefusal, VerifyError};
use bursar_runtime::retained::LeaseError;

/// `bursar_status`, documented in the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Status {
    Ok = 0,
    Invalid = 1,
    Missing = 2,
    Busy = 3,
    Quota = 4,
    Corrupt = 5,
    Fenced = 6,
    Refused = 7,
    Driver = 8,
    Internal = 9,
}

/// Failure of a call.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    status: Status,
    cuda: i32,
    text: String,
}

impl Failure {
    pub(crate) fn invalid(text: String) -> Failure {
        let (status, cuda) = (Status::Invalid, 0);
        Failure { status, cuda, text }
    }

    pub(crate) fn null(what: &str) -> Failure {
        Failure::invalid(format!(
            "failed to read the arguments: {what} is NULL; pass a pointer"
        ))
    }

    pub(crate) fn ended() -> Failure {
        Failure::invalid(
            "failed to use the lease: it was discarded when its commit failed; open it again"
                .to_owned(),
        )
    }

    pub(crate) fn panicked() -> Failure {
        Failure {
            status: Status::Internal,
            cuda: 0,
            text: "failed to finish the call: Bursar panicked; the message is on standard error"
                .to_owned(),
        }
    }
}

impl From<LeaseError> for Failure {
    fn from(error: LeaseError) -> Failure {
        let cuda = match &error {
            LeaseError::Cuda(error)
            | LeaseError::Driver(DriverError::Cuda(error))
            | LeaseError::Lost { source: error, .. } => error.code,
            LeaseError::Refused {
                reason: RetainedRefusal::Driver { code },
                ..
            } => *code,
            _ => 0,
        };
        Failure {
            status: status(&error),
            cuda,
            text: error.to_string(),
        }
    }
}

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Failure {
        Failure::from(LeaseError::Driver(error))
    }
}

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Failure {
        Failure::from(LeaseError::Cuda(error))
    }
}

impl From<TokenError> for Failure {
    fn from(error: TokenError) -> Failure {
        let status = match &error {
            TokenError::AgentUnreachable { .. }
            | TokenError::Rejected(RejectReason::Busy)
            | TokenError::Refused(TokenRefusal::Unavailable) => Status::Busy,
            TokenError::UnexpectedResponse => Status::Internal,
            TokenError::Refused(TokenRefusal::Malformed) => Status::Invalid,
            TokenError::Refused(TokenRefusal::Fenced { .. } | TokenRefusal::AskerFenced) => {
                Status::Fenced
            }
            TokenError::Refused(TokenRefusal::NoLease) => Status::Missing,
            TokenError::Rejected(_)
            | TokenError::Refused(
                TokenRefusal::Forged
                | TokenRefusal::Elsewhere { .. }
                | TokenRefusal::Unknown
                | TokenRefusal::NoSession,
            ) => Status::Refused,
        };
        Failure {
            status,
            cuda: 0,
            text: error.to_string(),
        }
    }
}

impl From<VerifyError> for Failure {
    fn from(error: VerifyError) -> Failure {
        let status = match error {
            VerifyError::Malformed => Status::Invalid,
            VerifyError::OtherKey | VerifyError::Forged => Status::Refused,
        };
        Failure {
            status,
            cuda: 0,
            text: error.to_string(),
        }
    }
}

fn status(error: &LeaseError) -> Status {
    match error {
        LeaseError::InvalidName { .. } | LeaseError::OutOfRange { .. } => Status::Invalid,
        LeaseError::AgentUnreachable { .. } | LeaseError::Rejected(RejectReason::Busy) => {
            Status::Busy
        }
        LeaseError::Rejected(_) => Status::Refused,
        LeaseError::UnexpectedResponse => Status::Internal,
        LeaseError::Corrupt { .. } | LeaseError::Lost { .. } => Status::Corrupt,
        LeaseError::Cuda(_) | LeaseError::Driver(_) => Status::Driver,
        LeaseError::Refused { reason, .. } => match reason {
            RetainedRefusal::Missing => Status::Missing,
            RetainedRefusal::Quota { .. } | RetainedRefusal::GpuLimit { .. } => Status::Quota,
            RetainedRefusal::Writing | RetainedRefusal::Unavailable => Status::Busy,
            RetainedRefusal::Fenced => Status::Fenced,
            RetainedRefusal::NotScrubbed | RetainedRefusal::TooMany | RetainedRefusal::Off => {
                Status::Refused
            }
            RetainedRefusal::Driver { .. } => Status::Driver,
        },
    }
}

thread_local! {
    static LAST: RefCell<(i32, CString)> = RefCell::default();
}

/// Text for a thread that stores no failure any more.
const ENDING: &CStr =
    c"failed to read the last failure: the thread is ending; call Bursar before its destructors";

/// Stores a failure and returns its status.
pub(crate) fn set(failure: Failure) -> Status {
    let Failure { status, cuda, text } = failure;
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    let _ = LAST.try_with(|last| *last.borrow_mut() = (cuda, text));
    status
}

/// Returns the text, valid until the thread's next failure.
pub(crate) fn text() -> *const c_char {
    LAST.try_with(|last| last.borrow().1.as_ptr())
        .unwrap_or(ENDING.as_ptr())
}

pub(crate) fn cuda() -> i32 {
    LAST.try_with(|last| last.borrow().0).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::mpsc::Sender;

    use super::*;

    /// Calls the library when its thread ends.
    struct LateCaller(Sender<(Status, String, i32)>);

    impl Drop for LateCaller {
        fn drop(&mut self) {
            let status = set(Failure::null("lease"));
            // SAFETY: the text ends with a zero and is constant here.
            let message = unsafe { CStr::from_ptr(text()) };
            let text = message.to_string_lossy().into_owned();
            self.0.send((status, text, cuda())).expect("the test waits");
        }
    }

    thread_local! {
        static LATE: RefCell<Option<LateCaller>> = const { RefCell::new(None) };
    }

    #[test]
    fn failure_has_a_status_when_its_thread_is_ending() {
        let (sender, received) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            // Thread-local values are dropped in the reverse order of their first use.
            LATE.set(Some(LateCaller(sender)));
            set(Failure::ended());
        });
        let ending = ENDING.to_str().expect("ASCII").to_owned();
        assert_eq!(received.recv(), Ok((Status::Invalid, ending, 0)));
    }

    #[test]
    fn status_is_busy_when_a_retry_may_succeed() {
        let status = |reason| super::status(&LeaseError::Rejected(reason));
        assert_eq!(status(RejectReason::Busy), Status::Busy);
        assert_eq!(status(RejectReason::Identity), Status::Refused);
    }
}
