//! What the agent says to a worker, the process that makes the kept memory of one GPU and keeps none of it.
//!
//! Frames are those of the [`wire`](crate::wire); descriptors travel beside them ([`socket`](crate::socket)). A
//! worker is started by the agent that it serves, from the same image, with its end of a socket pair as standard
//! input: there are no versions, and the agent's end is the worker's. It does one thing after the other, and
//! answers each in turn; who waits for it has a deadline.
//!
//! ```text
//! agent                                   worker
//!                                     <-  Ready {driver, granularity, total} unasked, or Failed {code, call} and its end
//!   Create {bytes}                    ->
//!                                     <-  Created {bytes} + fd | Failed {code, call}
//!   Sweep {bytes}                     ->                         (waits until the driver has scrubbed so much)
//!                                     <-  Swept | Failed {code, call}
//! ```
//!
//! The canary (`bursar-worker canary --gpu UUID`) speaks no protocol: it prints lines of JSON. The first is
//! `{"verdict": "Context"}` once it has a context and nothing else; it goes on when its standard input says or ends
//! something, or after ten seconds. The last is `"Scrubbed"`, `"NotScrubbed"` or `"Failed"` with further fields for
//! whoever reads it. It ends with 0.
#![forbid(unsafe_code)]

use crate::wire::{Fields, Message, WireError, put_name};

/// What the agent says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToWorker {
    /// Asks for memory.
    Create {
        /// How much, in bytes; rounded up to the driver's granularity.
        bytes: u64,
    },
    /// Much was freed: waits until the driver will have scrubbed it, and makes it take that into account.
    Sweep {
        /// How much was freed, in bytes.
        bytes: u64,
    },
}

/// What the worker says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromWorker {
    /// It has the driver and its GPU.
    Ready {
        /// The driver's version as `cuDriverGetVersion` counts, such as 13000.
        driver: i32,
        /// What sizes are multiples of, in bytes.
        granularity: u64,
        /// The GPU's memory, in bytes.
        total: u64,
    },
    /// Memory; its descriptor comes with it, and is all that keeps it a moment later: by its next answer the worker has
    /// closed its own.
    Created {
        /// How much it is, in bytes.
        bytes: u64,
    },
    /// What was freed is scrubbed.
    Swept,
    /// The driver said no.
    Failed {
        /// The `CUresult`; -1 where there is no driver, or none that has the function.
        code: i32,
        /// The driver's function, for example `cuMemCreate`.
        call: String,
    },
}

impl Message for ToWorker {
    fn payload(&self) -> Vec<u8> {
        let (message, bytes) = match self {
            ToWorker::Create { bytes } => (1, bytes),
            ToWorker::Sweep { bytes } => (2, bytes),
        };
        [&[message], bytes.to_le_bytes().as_slice()].concat()
    }

    fn parse(payload: &[u8]) -> Result<ToWorker, WireError> {
        let mut fields = Fields(payload);
        let message = match fields.u8()? {
            1 => ToWorker::Create {
                bytes: fields.u64()?,
            },
            2 => ToWorker::Sweep {
                bytes: fields.u64()?,
            },
            other => return Err(WireError::UnknownMessage(other)),
        };
        fields.end(message)
    }
}

impl Message for FromWorker {
    fn payload(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            FromWorker::Ready {
                driver,
                granularity,
                total,
            } => {
                out.push(1);
                out.extend_from_slice(&driver.to_le_bytes());
                out.extend_from_slice(&granularity.to_le_bytes());
                out.extend_from_slice(&total.to_le_bytes());
            }
            FromWorker::Created { bytes } => {
                out.push(2);
                out.extend_from_slice(&bytes.to_le_bytes());
            }
            FromWorker::Swept => out.push(3),
            FromWorker::Failed { code, call } => {
                out.push(4);
                out.extend_from_slice(&code.to_le_bytes());
                put_name(&mut out, call);
            }
        }
        out
    }

    fn parse(payload: &[u8]) -> Result<FromWorker, WireError> {
        let mut fields = Fields(payload);
        let message = match fields.u8()? {
            1 => FromWorker::Ready {
                driver: fields.u32()?.cast_signed(),
                granularity: fields.u64()?,
                total: fields.u64()?,
            },
            2 => FromWorker::Created {
                bytes: fields.u64()?,
            },
            3 => FromWorker::Swept,
            4 => FromWorker::Failed {
                code: fields.u32()?.cast_signed(),
                call: fields.name()?,
            },
            other => return Err(WireError::UnknownMessage(other)),
        };
        fields.end(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn to_worker() -> impl Strategy<Value = ToWorker> {
        prop_oneof![
            any::<u64>().prop_map(|bytes| ToWorker::Create { bytes }),
            any::<u64>().prop_map(|bytes| ToWorker::Sweep { bytes }),
        ]
    }

    fn from_worker() -> impl Strategy<Value = FromWorker> {
        prop_oneof![
            any::<(i32, u64, u64)>().prop_map(|(driver, granularity, total)| FromWorker::Ready {
                driver,
                granularity,
                total
            }),
            any::<u64>().prop_map(|bytes| FromWorker::Created { bytes }),
            Just(FromWorker::Swept),
            (any::<i32>(), "[a-zA-Z0-9_]{0,96}")
                .prop_map(|(code, call)| FromWorker::Failed { code, call }),
        ]
    }

    proptest! {
        #[test]
        fn messages_round_trip(message in to_worker(), answer in from_worker()) {
            prop_assert_eq!(ToWorker::parse(&message.payload()), Ok(message));
            prop_assert_eq!(FromWorker::parse(&answer.payload()), Ok(answer));
        }

        #[test]
        fn garbage_is_rejected_or_encodes_to_itself(
            bytes in proptest::collection::vec(any::<u8>(), 0..64),
        ) {
            if let Ok(message) = ToWorker::parse(&bytes) {
                prop_assert_eq!(message.payload(), bytes.clone());
            }
            if let Ok(answer) = FromWorker::parse(&bytes) {
                prop_assert_eq!(answer.payload(), bytes);
            }
        }
    }
}
