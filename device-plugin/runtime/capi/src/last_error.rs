//! Stores a thread's last failure: status, text and the driver's code.

use std::cell::RefCell;
use std::ffi::{CString, c_char};

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

/// Stores a failure and returns its status.
pub(crate) fn set(failure: Failure) -> Status {
    let Failure { status, cuda, text } = failure;
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    LAST.with_borrow_mut(|last| *last = (cuda, text));
    status
}

/// Returns the text, valid until the thread's next failure.
pub(crate) fn text() -> *const c_char {
    LAST.with_borrow(|(_, text)| text.as_ptr())
}

pub(crate) fn cuda() -> i32 {
    LAST.with_borrow(|(cuda, _)| *cuda)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_is_busy_when_a_retry_may_succeed() {
        let status = |reason| super::status(&LeaseError::Rejected(reason));
        assert_eq!(status(RejectReason::Busy), Status::Busy);
        assert_eq!(status(RejectReason::Identity), Status::Refused);
    }
}
