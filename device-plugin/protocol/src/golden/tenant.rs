//! Holds the messages of a tenant's processes and of the agent against those of released versions.

use super::assert_messages;
use crate::messages::retained::{LeaseName, RetainedRefusal, RetainedRequest, RetainedResponse};
use crate::messages::token::{
    Generation, Generations, GpuToken, MemoryId, TokenRefusal, TokenRequest, TokenResponse,
};
use crate::messages::{
    Account, HeldCredit, ProcessUsage, Quota, Recovery, RejectReason, Request, Response,
};
use crate::units::Units;

fn device() -> Account {
    Account::Device("GPU-5e000000-0000-0000-0000-000000000001".to_owned())
}

fn token() -> GpuToken {
    GpuToken::try_from(vec![2, 7, 9]).unwrap()
}

#[test]
fn requests_of_processes_have_their_golden_frames() {
    use Request::{Retained, Token};
    let holding = |account| HeldCredit {
        account,
        granted: Units(0x20),
        used: Units(0x10),
    };
    let samples = samples!(Request:
        "Hello", Request::Hello { .. } => Request::Hello {
            version: 3,
            image: 0x0102_0304_0506_0708,
            holdings: vec![holding(device()), holding(Account::Managed)],
        };
        "Credit", Request::Credit { .. } => Request::Credit { account: 1, units: Units(0x30) };
        "Denied", Request::Denied { .. } => Request::Denied {
            account: 1,
            bytes: 1 << 30,
            function: "cuMemAlloc_v2".to_owned(),
        };
        "Refresh", Request::Refresh => Request::Refresh;
        "Query", Request::Query { .. } => Request::Query { version: 3, account: device() };
        "ContextMade", Request::ContextMade { .. } => Request::ContextMade { account: 2 };
        "Retained.Open", Retained(RetainedRequest::Open { .. }) => Retained(RetainedRequest::Open {
            version: 3,
            image: 7,
            account: device(),
            name: LeaseName::try_from("weights".to_owned()).unwrap(),
            key: [0x0a; 32],
            bytes: 1 << 21,
        });
        "Retained.Commit", Retained(RetainedRequest::Commit { .. }) => Retained(
            RetainedRequest::Commit { version: 3, lease: 8, token: 9, checksum: 10 }
        );
        "Retained.Discard", Retained(RetainedRequest::Discard { .. }) => Retained(
            RetainedRequest::Discard { version: 3, lease: 8 }
        );
        "Token.Seal", Token(TokenRequest::Seal { .. }) => Token(TokenRequest::Seal {
            version: 3,
            account: device(),
            lease: 8,
            block: 11,
        });
        "Token.Redeem", Token(TokenRequest::Redeem { .. }) => Token(TokenRequest::Redeem {
            version: 3,
            token: token(),
        });
        "Poisoned", Request::Poisoned { .. } => Request::Poisoned {
            account: 1,
            code: 719,
            can_reexec: true,
        };
    );
    assert_messages("tenant.request", &samples);
}

#[test]
fn responses_to_processes_have_their_golden_frames() {
    let quotas = || {
        [device(), Account::Managed]
            .map(|account| Quota {
                account,
                bytes: 1 << 31,
            })
            .to_vec()
    };
    let rejected = |reason| Response::Rejected { reason };
    let samples = samples!(Response:
        "Welcome.Version1", Response::Welcome { generation: None, .. } => Response::Welcome {
            version: 1,
            generation: None,
            quotas: quotas(),
        };
        "Welcome", Response::Welcome { generation: Some(_), .. } => Response::Welcome {
            version: 3,
            generation: Some(4),
            quotas: quotas(),
        };
        "Granted", Response::Granted { .. } => Response::Granted { account: 1, units: Units(0x40) };
        "Refused", Response::Refused { .. } => Response::Refused { account: 1, free: Units(0x41) };
        "Refreshed", Response::Refreshed => Response::Refreshed;
        "Usage", Response::Usage { .. } => Response::Usage {
            quota: 1 << 31,
            used: 1 << 30,
            processes: vec![ProcessUsage { pid: 42, bytes: 1 << 20 }],
        };
        "ContextSize", Response::ContextSize { .. } => Response::ContextSize {
            account: 1,
            units: Units(0x42),
        };
        "Fenced", Response::Fenced { .. } => Response::Fenced { account: 1 };
        "Recovery.Reexec", Response::Recovery(Recovery::Reexec) => Response::Recovery(
            Recovery::Reexec
        );
        "Recovery.Continue", Response::Recovery(Recovery::Continue) => Response::Recovery(
            Recovery::Continue
        );
        "Recovery.End", Response::Recovery(Recovery::End { .. }) => Response::Recovery(
            Recovery::End { seconds: 30 }
        );
        "Rejected.Version", Response::Rejected { reason: RejectReason::Version } => rejected(
            RejectReason::Version
        );
        "Rejected.Identity", Response::Rejected { reason: RejectReason::Identity } => rejected(
            RejectReason::Identity
        );
        "Rejected.Busy", Response::Rejected { reason: RejectReason::Busy } => rejected(
            RejectReason::Busy
        );
        "Rejected.Account", Response::Rejected { reason: RejectReason::Account } => rejected(
            RejectReason::Account
        );
        "Retained", Response::Retained(_) => Response::Retained(RetainedResponse::Committed);
        "Token", Response::Token(_) => Response::Token(TokenResponse::Sealed(token()));
    );
    assert_messages("tenant.response", &samples);
}

#[test]
fn responses_about_retained_memory_have_their_golden_frames() {
    use RetainedResponse::Refused;
    let samples = samples!(RetainedResponse:
        "Ready", RetainedResponse::Ready { .. } => RetainedResponse::Ready {
            lease: 8,
            generation: 9,
            bytes: 1 << 21,
            checksum: 10,
        };
        "Write", RetainedResponse::Write { .. } => RetainedResponse::Write {
            lease: 8,
            generation: 9,
            bytes: 1 << 21,
            token: 11,
            expires_ms: 60_000,
        };
        "Committed", RetainedResponse::Committed => RetainedResponse::Committed;
        "Discarded", RetainedResponse::Discarded => RetainedResponse::Discarded;
        "Refused.Missing", Refused(RetainedRefusal::Missing) => Refused(RetainedRefusal::Missing);
        "Refused.Quota", Refused(RetainedRefusal::Quota { .. }) => Refused(
            RetainedRefusal::Quota { free: 12 }
        );
        "Refused.GpuLimit", Refused(RetainedRefusal::GpuLimit { .. }) => Refused(
            RetainedRefusal::GpuLimit { free: 13 }
        );
        "Refused.Writing", Refused(RetainedRefusal::Writing) => Refused(RetainedRefusal::Writing);
        "Refused.NotScrubbed", Refused(RetainedRefusal::NotScrubbed) => Refused(
            RetainedRefusal::NotScrubbed
        );
        "Refused.Fenced", Refused(RetainedRefusal::Fenced) => Refused(RetainedRefusal::Fenced);
        "Refused.Unavailable", Refused(RetainedRefusal::Unavailable) => Refused(
            RetainedRefusal::Unavailable
        );
        "Refused.TooMany", Refused(RetainedRefusal::TooMany) => Refused(RetainedRefusal::TooMany);
        "Refused.Off", Refused(RetainedRefusal::Off) => Refused(RetainedRefusal::Off);
        "Refused.Driver", Refused(RetainedRefusal::Driver { .. }) => Refused(
            RetainedRefusal::Driver { code: 2 }
        );
    );
    let samples = samples.into_iter();
    let samples: Vec<_> = samples
        .map(|(name, answer)| (name, Response::Retained(answer)))
        .collect();
    assert_messages("retained.response", &samples);
}

#[test]
fn responses_about_tokens_have_their_golden_frames() {
    use TokenResponse::Refused;
    let fenced = |which| {
        Refused(TokenRefusal::Fenced {
            which,
            generation: 14,
        })
    };
    let samples = samples!(TokenResponse:
        "Sealed", TokenResponse::Sealed(_) => TokenResponse::Sealed(token());
        "Redeemed", TokenResponse::Redeemed(_) => TokenResponse::Redeemed(MemoryId {
            node: "node-a".to_owned(),
            gpu: "GPU-5e000000-0000-0000-0000-000000000001".to_owned(),
            container: 1,
            generations: Generations { gpu: 2, process: 3, lease: 4 },
            block: 5,
        });
        "Refused.Malformed", Refused(TokenRefusal::Malformed) => Refused(TokenRefusal::Malformed);
        "Refused.Forged", Refused(TokenRefusal::Forged) => Refused(TokenRefusal::Forged);
        "Refused.Elsewhere", Refused(TokenRefusal::Elsewhere { .. }) => Refused(
            TokenRefusal::Elsewhere { node: "node-b".to_owned() }
        );
        "Refused.Unknown", Refused(TokenRefusal::Unknown) => Refused(TokenRefusal::Unknown);
        "Refused.Fenced.Gpu", Refused(TokenRefusal::Fenced { which: Generation::Gpu, .. }) => fenced(
            Generation::Gpu
        );
        "Refused.Fenced.Process", Refused(
            TokenRefusal::Fenced { which: Generation::Process, .. }
        ) => fenced(Generation::Process);
        "Refused.Fenced.Lease", Refused(
            TokenRefusal::Fenced { which: Generation::Lease, .. }
        ) => fenced(Generation::Lease);
        "Refused.AskerFenced", Refused(TokenRefusal::AskerFenced) => Refused(
            TokenRefusal::AskerFenced
        );
        "Refused.NoSession", Refused(TokenRefusal::NoSession) => Refused(TokenRefusal::NoSession);
        "Refused.NoLease", Refused(TokenRefusal::NoLease) => Refused(TokenRefusal::NoLease);
        "Refused.Unavailable", Refused(TokenRefusal::Unavailable) => Refused(
            TokenRefusal::Unavailable
        );
    );
    let samples = samples.into_iter();
    let samples: Vec<_> = samples
        .map(|(name, answer)| (name, Response::Token(answer)))
        .collect();
    assert_messages("token.response", &samples);
}
