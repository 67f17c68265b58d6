//! Fuzzes frames and pages for a second each: what parses must encode to the same bytes.
//!
//! Inputs differ from run to run; a failure prints the seed that repeats it (`BOLERO_RANDOM_SEED`).
//! `BOLERO_RANDOM_ITERATIONS=10000000 cargo test -p bursar-protocol --test fuzz` searches longer,
//! as does `BOLERO_RANDOM_TEST_TIME_MS` with a time.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use std::cell::Cell;
use std::fmt::Debug;

use bursar_protocol::messages::{MAX_PAYLOAD, Message};

#[path = "fuzz/mutate.rs"]
mod mutate;

#[path = "fuzz/fdstore.rs"]
mod fdstore;
#[path = "fuzz/messages.rs"]
mod messages;
#[path = "fuzz/page.rs"]
mod page;
#[path = "fuzz/provisioner.rs"]
mod provisioner;

fn payloads(messages: &[impl Message]) -> Vec<Vec<u8>> {
    messages.iter().map(Message::payload).collect()
}

/// Asserts that each mutated sample is an error, or the one message that encodes to it.
fn parses<M: Message + Debug>(samples: &[Vec<u8>]) {
    check_parsed(samples, |message: M, bytes| {
        assert_eq!(message.payload(), bytes, "{message:?}");
    });
}

/// Asserts that each mutated sample is an error, or a message that keeps what it says. The same
/// message has several texts of JSON.
fn parses_json<M: Message + Debug + PartialEq>(samples: &[Vec<u8>]) {
    check_parsed(samples, |message: M, _| {
        assert_eq!(M::parse(&message.payload()), Ok(message));
    });
}

fn check_parsed<M: Message>(samples: &[Vec<u8>], check: impl Fn(M, &[u8])) {
    for sample in samples {
        assert!(M::parse(sample).is_ok(), "no message: {sample:?}");
    }
    let (tried, parsed) = (Cell::new(0u64), Cell::new(0u64));
    let count = |counter: &Cell<u64>| counter.set(counter.get() + 1);
    let check = |bytes: &[u8]| {
        count(&tried);
        if let Ok(message) = M::parse(bytes) {
            count(&parsed);
            check(message, bytes);
        }
    };
    let check = std::panic::AssertUnwindSafe(check);
    bolero::check!()
        .with_generator(mutate::edits())
        .for_each(|edits| {
            let mut bytes = edits.apply(samples);
            bytes.truncate(MAX_PAYLOAD);
            check(&bytes);
        });
    let (tried, parsed) = (tried.get(), parsed.get());
    println!("{tried} frames, {parsed} parsed");
    assert!(parsed * 100 > tried, "the changes reach nothing");
}
