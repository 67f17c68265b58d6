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
//! something, or after ten seconds. The last is `"Scrubbed"`, `"NotScrubbed"` or `"Failed"` with further decoder for
//! whoever reads it. It ends with 0.
#![forbid(unsafe_code)]

use crate::messages::{DecodeError, Decoder, Message, encode_name};

/// What the agent says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProvisionerRequest {
    /// Asks for memory.
    Create {
        /// How much, in bytes; rounded up to the driver's granularity.
        bytes: u64,
    },
    /// Much was freed: waits until the driver will have scrubbed it, and makes it take that into account.
    AwaitScrub {
        /// How much was freed, in bytes.
        bytes: u64,
    },
}

/// What the worker says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProvisionerResponse {
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
    Scrubbed,
    /// The driver said no.
    Failed {
        /// The `CUresult`; -1 where there is no driver, or none that has the function.
        code: i32,
        /// The driver's function, for example `cuMemCreate`.
        call: String,
    },
}

impl Message for ProvisionerRequest {
    fn payload(&self) -> Vec<u8> {
        let (message, bytes) = match self {
            ProvisionerRequest::Create { bytes } => (1, bytes),
            ProvisionerRequest::AwaitScrub { bytes } => (2, bytes),
        };
        [&[message], bytes.to_le_bytes().as_slice()].concat()
    }

    fn parse(payload: &[u8]) -> Result<ProvisionerRequest, DecodeError> {
        let mut decoder = Decoder(payload);
        let message = match decoder.u8()? {
            1 => ProvisionerRequest::Create {
                bytes: decoder.u64()?,
            },
            2 => ProvisionerRequest::AwaitScrub {
                bytes: decoder.u64()?,
            },
            other => return Err(DecodeError::UnknownMessage(other)),
        };
        decoder.finish(message)
    }
}

impl Message for ProvisionerResponse {
    fn payload(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            ProvisionerResponse::Ready {
                driver,
                granularity,
                total,
            } => {
                out.push(1);
                out.extend_from_slice(&driver.to_le_bytes());
                out.extend_from_slice(&granularity.to_le_bytes());
                out.extend_from_slice(&total.to_le_bytes());
            }
            ProvisionerResponse::Created { bytes } => {
                out.push(2);
                out.extend_from_slice(&bytes.to_le_bytes());
            }
            ProvisionerResponse::Scrubbed => out.push(3),
            ProvisionerResponse::Failed { code, call } => {
                out.push(4);
                out.extend_from_slice(&code.to_le_bytes());
                encode_name(&mut out, call);
            }
        }
        out
    }

    fn parse(payload: &[u8]) -> Result<ProvisionerResponse, DecodeError> {
        let mut decoder = Decoder(payload);
        let message = match decoder.u8()? {
            1 => ProvisionerResponse::Ready {
                driver: decoder.u32()?.cast_signed(),
                granularity: decoder.u64()?,
                total: decoder.u64()?,
            },
            2 => ProvisionerResponse::Created {
                bytes: decoder.u64()?,
            },
            3 => ProvisionerResponse::Scrubbed,
            4 => ProvisionerResponse::Failed {
                code: decoder.u32()?.cast_signed(),
                call: decoder.name()?,
            },
            other => return Err(DecodeError::UnknownMessage(other)),
        };
        decoder.finish(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request() -> impl Strategy<Value = ProvisionerRequest> {
        prop_oneof![
            any::<u64>().prop_map(|bytes| ProvisionerRequest::Create { bytes }),
            any::<u64>().prop_map(|bytes| ProvisionerRequest::AwaitScrub { bytes }),
        ]
    }

    fn response() -> impl Strategy<Value = ProvisionerResponse> {
        prop_oneof![
            any::<(i32, u64, u64)>().prop_map(|(driver, granularity, total)| {
                ProvisionerResponse::Ready {
                    driver,
                    granularity,
                    total,
                }
            }),
            any::<u64>().prop_map(|bytes| ProvisionerResponse::Created { bytes }),
            Just(ProvisionerResponse::Scrubbed),
            (any::<i32>(), "[a-zA-Z0-9_]{0,96}")
                .prop_map(|(code, call)| ProvisionerResponse::Failed { code, call }),
        ]
    }

    proptest! {
        #[test]
        fn messages_round_trip(message in request(), answer in response()) {
            prop_assert_eq!(ProvisionerRequest::parse(&message.payload()), Ok(message));
            prop_assert_eq!(ProvisionerResponse::parse(&answer.payload()), Ok(answer));
        }

        #[test]
        fn garbage_is_rejected_or_encodes_to_itself(
            bytes in proptest::collection::vec(any::<u8>(), 0..64),
        ) {
            if let Ok(message) = ProvisionerRequest::parse(&bytes) {
                prop_assert_eq!(message.payload(), bytes.clone());
            }
            if let Ok(answer) = ProvisionerResponse::parse(&bytes) {
                prop_assert_eq!(answer.payload(), bytes);
            }
        }
    }
}
