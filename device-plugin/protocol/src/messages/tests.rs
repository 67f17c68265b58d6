//! Tests that messages round-trip and that the parser is total.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::credit_page::MAX_SLOTS;

fn units() -> impl Strategy<Value = Units> {
    (0..=Units::MAX.0).prop_map(Units)
}

fn account() -> impl Strategy<Value = Account> {
    prop_oneof![
        "[ -~]{0,96}".prop_map(Account::Device),
        Just(Account::Managed)
    ]
}

fn request() -> impl Strategy<Value = Request> {
    let slot = 0..MAX_SLOTS as u8;
    let holding = (account(), units(), units()).prop_map(|(account, granted, used)| HeldCredit {
        account,
        granted,
        used,
    });
    prop_oneof![
        (any::<u16>(), any::<u64>(), vec(holding, 0..=MAX_SLOTS)).prop_map(
            |(version, image, holdings)| Request::Hello {
                version,
                image,
                holdings
            }
        ),
        (slot.clone(), units()).prop_map(|(account, units)| Request::Credit { account, units }),
        slot.clone()
            .prop_map(|account| Request::ContextMade { account }),
        (slot.clone(), any::<i32>(), any::<bool>()).prop_map(|(account, code, can_reexec)| {
            Request::Poisoned {
                account,
                code,
                can_reexec,
            }
        }),
        (slot, any::<u64>(), "[a-zA-Z0-9_]{0,96}").prop_map(|(account, bytes, function)| {
            Request::Denied {
                account,
                bytes,
                function,
            }
        }),
        Just(Request::Refresh),
        (any::<u16>(), account())
            .prop_map(|(version, account)| Request::Query { version, account }),
        retained::tests::questions(account()).prop_map(Request::Retained),
        token::tests::questions(account()).prop_map(Request::Token),
    ]
}

fn response() -> impl Strategy<Value = Response> {
    let slot = 0..MAX_SLOTS as u8;
    let quota = (account(), any::<u64>()).prop_map(|(account, bytes)| Quota { account, bytes });
    let process = (any::<u32>(), any::<u64>()).prop_map(|(pid, bytes)| ProcessUsage { pid, bytes });
    let reason = prop_oneof![
        Just(RejectReason::Version),
        Just(RejectReason::Identity),
        Just(RejectReason::Busy),
        Just(RejectReason::Account)
    ];
    prop_oneof![
        (
            any::<u16>(),
            any::<Option<u64>>(),
            vec(quota, 0..=MAX_SLOTS)
        )
            .prop_map(|(version, generation, quotas)| Response::Welcome {
                version,
                generation,
                quotas
            }),
        slot.clone()
            .prop_map(|account| Response::Fenced { account }),
        prop_oneof![
            Just(Recovery::Reexec),
            Just(Recovery::Continue),
            any::<u16>().prop_map(|seconds| Recovery::End { seconds }),
        ]
        .prop_map(Response::Recovery),
        (slot.clone(), units()).prop_map(|(account, units)| Response::Granted { account, units }),
        (slot.clone(), units())
            .prop_map(|(account, units)| Response::ContextSize { account, units }),
        (slot, units()).prop_map(|(account, free)| Response::Refused { account, free }),
        Just(Response::Refreshed),
        (any::<u64>(), any::<u64>(), vec(process, 0..=MAX_LISTED)).prop_map(
            |(quota, used, processes)| Response::Usage {
                quota,
                used,
                processes
            }
        ),
        reason.prop_map(|reason| Response::Rejected { reason }),
        retained::tests::answers().prop_map(Response::Retained),
        token::tests::answers().prop_map(Response::Token),
    ]
}

proptest! {
    #[test]
    fn messages_round_trip(message in request(), answer in response()) {
        prop_assert_eq!(Request::parse(&message.payload()), Ok(message));
        prop_assert_eq!(Response::parse(&answer.payload()), Ok(answer));
    }

    #[test]
    fn every_message_fits_in_a_frame(message in request(), answer in response()) {
        for frame in [message.frame(), answer.frame()] {
            prop_assert_eq!(payload_length([frame[0], frame[1]]), Ok(frame.len() - HEADER));
        }
    }

    #[test]
    fn parse_never_panics_when_a_message_is_mutated(
        message in request(), at: prop::sample::Index, byte: u8, cut: prop::sample::Index,
    ) {
        let mut bytes = message.payload();
        let place = at.index(bytes.len());
        bytes[place] = byte;
        if let Ok(other) = Request::parse(&bytes) {
            prop_assert_eq!(other.payload(), bytes.clone());
        }
        let short = &message.payload()[..cut.index(bytes.len())];
        prop_assert!(Request::parse(short).is_err(), "{:?} parsed though it was cut", short);
        let mut long = message.payload();
        long.push(byte);
        prop_assert_eq!(Request::parse(&long), Err(DecodeError::Trailing(1)));
    }
}

#[test]
fn welcome_without_a_generation_is_version_1() {
    let quotas = vec![Quota {
        account: Account::Managed,
        bytes: 5,
    }];
    let welcome = Response::Welcome {
        version: 1,
        generation: None,
        quotas,
    };
    assert_eq!(welcome.payload(), [1, 1, 0, 1, 1, 5, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn frame_beyond_the_bound_is_refused_by_its_header() {
    assert_eq!(payload_length([0, 0]), Err(DecodeError::Short));
    assert_eq!(
        payload_length([0xff, 0xff]),
        Err(DecodeError::TooLong("frame"))
    );
}

#[test]
fn long_name_is_cut_at_a_char_boundary() {
    let function = "ä".repeat(MAX_NAME);
    let sent = Request::Denied {
        account: 0,
        bytes: 1,
        function,
    };
    let Request::Denied { function, .. } = Request::parse(&sent.payload()).unwrap() else {
        panic!()
    };
    assert_eq!(function, "ä".repeat(MAX_NAME / 2));
}
