//! Defines the messages between the agent and a provisioner, which creates the retained memory of
//! one GPU.
//!
//! Frames are those of the [`messages`](crate::messages), and a payload is JSON, because both sides
//! are root's and of one image. Descriptors travel with them ([`fd_passing`](crate::fd_passing)).
//! The agent starts a provisioner from its own image, with an
//! end of a socket pair as standard input. So there are no versions, and the provisioner ends with
//! the agent. It keeps no memory, handles one request at a time and answers in order. The agent's
//! waits have deadlines.
//!
//! ```text
//! agent                                   provisioner
//!                                     <-  Ready {driver, granularity, total, concurrent}
//!                                         at its start, or Failed {code, call} and exit
//!   Create {bytes, lendable}          ->
//!                                     <-  Created {bytes} + fd | Failed {code, call}
//!   AwaitScrub {bytes}                ->          (waits until the driver has scrubbed that much)
//!                                     <-  Scrubbed | Failed {code, call}
//! ```
//!
//! The scrub check (`bursar-provisioner scrub-check --gpu UUID`) speaks no protocol: it prints
//! lines of JSON. The first is `{"verdict": "Context"}` once it has a context and nothing else. It
//! continues when its standard input has a line or ends, or after ten seconds. The last line is
//! `"Scrubbed"`, `"NotScrubbed"` or `"Failed"`, with further fields for people. It exits with 0.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

use crate::messages::JsonMessage;

/// A request of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum ProvisionerRequest {
    /// Requests memory.
    Create {
        /// The amount in bytes, rounded up to the driver's granularity.
        bytes: u64,
        /// The most that the GPU may lend beyond what it has lent, in bytes: the provisioner's
        /// budget.
        lendable: u64,
    },
    /// Waits until the driver will have scrubbed memory that was freed, and makes the driver count
    /// it as free.
    AwaitScrub {
        /// The freed amount, in bytes.
        bytes: u64,
    },
}

/// A response of the provisioner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum ProvisionerResponse {
    /// The provisioner has opened the driver and its GPU.
    Ready {
        /// The driver's version as `cuDriverGetVersion` counts, such as 13000.
        driver: i32,
        /// The granularity of sizes, in bytes.
        granularity: u64,
        /// The GPU's memory, in bytes.
        total: u64,
        /// Whether the GPU and the host can access managed memory at the same time
        /// (`CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS`).
        concurrent_managed_access: bool,
    },
    /// Memory, whose descriptor comes with it. The provisioner closes its own descriptor before its
    /// next answer, so that this one alone keeps the memory.
    Created {
        /// The size in bytes.
        bytes: u64,
    },
    /// The freed memory is scrubbed.
    Scrubbed,
    /// The driver returned an error.
    Failed {
        /// The `CUresult`; -1 without a driver, or with one that lacks the function.
        code: i32,
        /// The driver's function, for example `cuMemCreate`; `budget` if the provisioner's budget
        /// has no room.
        call: String,
    },
}

impl JsonMessage for ProvisionerRequest {}

impl JsonMessage for ProvisionerResponse {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::Message;
    use proptest::prelude::*;

    fn request() -> impl Strategy<Value = ProvisionerRequest> {
        prop_oneof![
            any::<(u64, u64)>()
                .prop_map(|(bytes, lendable)| ProvisionerRequest::Create { bytes, lendable }),
            any::<u64>().prop_map(|bytes| ProvisionerRequest::AwaitScrub { bytes }),
        ]
    }

    fn response() -> impl Strategy<Value = ProvisionerResponse> {
        prop_oneof![
            any::<(i32, u64, u64, bool)>().prop_map(
                |(driver, granularity, total, concurrent_managed_access)| {
                    ProvisionerResponse::Ready {
                        driver,
                        granularity,
                        total,
                        concurrent_managed_access,
                    }
                }
            ),
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
        fn garbage_is_rejected_or_a_message(
            message in request(), at: prop::sample::Index, byte: u8,
        ) {
            let mut bytes = message.payload();
            let place = at.index(bytes.len());
            bytes[place] = byte;
            if let Ok(other) = ProvisionerRequest::parse(&bytes) {
                prop_assert_eq!(ProvisionerRequest::parse(&other.payload()), Ok(other));
            }
        }
    }
}
