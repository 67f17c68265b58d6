//! Mutated messages by the hundred thousand: what parses is what encodes to the same bytes.
//!
//! Unlike bytes at random, a message with a few bytes changed, moved or doubled reaches every field; those
//! that parse are mutated on.

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::kept::KeptRefusal;
use super::token::{Generation, Generations, GpuToken, MemoryId, TokenRefusal};
use super::*;

const ROUNDS: u32 = 400_000;

/// Messages that are kept to be mutated.
const CORPUS: usize = 1024;

/// As many as [`corpus`] has.
const BEGINNING: usize = 21;

struct Dice(StdRng);

impl Dice {
    fn below(&mut self, sides: usize) -> usize {
        self.0.random_range(0..sides.max(1))
    }

    /// Bytes at the edges of lengths, indexes and numbers more often than others.
    fn byte(&mut self) -> u8 {
        let edges = [0, 1, 2, 5, 62, 63, 64, 95, 96, 97, 127, 128, 254, 255];
        match self.below(2) {
            0 => edges[self.below(edges.len())],
            _ => self.below(256) as u8,
        }
    }

    fn mutate(&mut self, bytes: &mut Vec<u8>, other: &[u8]) {
        let place = self.below(bytes.len() + 1);
        let end = (place + self.below(16)).min(bytes.len());
        match self.below(5) {
            0 => bytes.insert(place, self.byte()),
            1 => drop(bytes.drain(place..end)),
            2 => bytes.extend_from_within(place..end),
            3 => bytes
                .splice(place.., other[self.below(other.len())..].iter().copied())
                .for_each(drop),
            _ => {
                let byte = self.byte();
                if let Some(changed) = bytes.get_mut(place) {
                    *changed = byte;
                }
            }
        }
    }
}

fn device() -> Account {
    Account::Device("GPU-5e000000-0000-0000-0000-000000000001".to_owned())
}

fn corpus() -> Vec<Vec<u8>> {
    let holdings = [device(), Account::Managed].map(|account| Holding {
        account,
        granted: Units::MAX,
        used: Units(1),
    });
    let quotas = [device(), Account::Managed].map(|account| Quota {
        account,
        bytes: u64::MAX,
    });
    let to_agent = [
        ToAgent::Hello {
            version: 1,
            image: u64::MAX,
            holdings: holdings.to_vec(),
        },
        ToAgent::Request {
            account: 0,
            units: Units(512),
        },
        ToAgent::Denied {
            account: 1,
            bytes: 4096,
            function: "cuMemAlloc_v2".to_owned(),
        },
        ToAgent::Refresh,
        ToAgent::Query {
            version: 1,
            account: device(),
        },
        ToAgent::Kept(KeptQuestion::Open {
            version: 1,
            image: 7,
            account: device(),
            name: "weights".to_owned().try_into().unwrap(),
            key: [9; 32],
            bytes: 1 << 30,
        }),
        ToAgent::Kept(KeptQuestion::Commit {
            version: 1,
            lease: 1,
            token: 2,
            checksum: 3,
        }),
        ToAgent::Poisoned {
            account: 0,
            code: 700,
            able: true,
        },
        ToAgent::Token(TokenQuestion::Seal {
            version: 3,
            account: device(),
            lease: 1,
            block: 2,
        }),
        ToAgent::Token(TokenQuestion::Redeem {
            version: 3,
            token: GpuToken::try_from(vec![1; 99]).unwrap(),
        }),
    ];
    let to_shim = [
        ToShim::Welcome {
            version: 1,
            generation: None,
            quotas: quotas.to_vec(),
        },
        ToShim::Welcome {
            version: 2,
            generation: Some(7),
            quotas: quotas.to_vec(),
        },
        ToShim::Fenced { account: 0 },
        ToShim::Verdict(Verdict::Execute),
        ToShim::Granted {
            account: 0,
            units: Units(512),
        },
        ToShim::Goodbye {
            reason: Reason::Busy,
        },
        ToShim::Usage {
            quota: 1 << 30,
            used: 4096,
            processes: vec![Listed {
                pid: 7,
                bytes: 4096,
            }],
        },
        ToShim::Kept(KeptAnswer::Write {
            lease: 1,
            generation: 2,
            bytes: 1 << 30,
            token: 3,
            expires_ms: 60_000,
        }),
        ToShim::Kept(KeptAnswer::Refused(KeptRefusal::Quota { free: 4096 })),
        ToShim::Token(TokenAnswer::Redeemed(MemoryId {
            node: "node-a".to_owned(),
            gpu: "GPU-5e000000-0000-0000-0000-000000000001".to_owned(),
            container: 1,
            generations: Generations {
                gpu: 2,
                process: 3,
                lease: 4,
            },
            block: 5,
        })),
        ToShim::Token(TokenAnswer::Refused(TokenRefusal::Fenced {
            which: Generation::Lease,
            generation: 4,
        })),
    ];
    let to_agent = to_agent.iter().map(Message::payload);
    to_agent
        .chain(to_shim.iter().map(Message::payload))
        .collect()
}

/// Whether it parses; and if it does, it is what it says.
fn parses<M: Message + std::fmt::Debug>(bytes: &[u8]) -> bool {
    match M::parse(bytes) {
        Ok(message) => {
            assert_eq!(message.payload(), bytes, "{message:?}");
            true
        }
        Err(_) => false,
    }
}

#[test]
fn whatever_is_made_of_messages_is_an_error_or_the_one_message_that_encodes_to_it() {
    let (mut corpus, mut dice, mut parsed) = (corpus(), Dice(StdRng::seed_from_u64(1)), 0);
    for _ in 0..ROUNDS {
        let mut bytes = corpus[dice.below(corpus.len())].clone();
        for _ in 0..=dice.below(4) {
            let other = &corpus[dice.below(corpus.len())];
            dice.mutate(&mut bytes, other);
        }
        bytes.truncate(MAX_PAYLOAD);
        let (agent, shim) = (parses::<ToAgent>(&bytes), parses::<ToShim>(&bytes));
        if agent || shim {
            parsed += 1;
            // The messages that it began with stay.
            let place = BEGINNING + dice.below(CORPUS - BEGINNING);
            if let Some(old) = corpus.get_mut(place) {
                *old = bytes;
            } else {
                corpus.push(bytes);
            }
        }
    }
    assert!(
        parsed > ROUNDS / 100,
        "{parsed} parsed: the mutations reach nothing"
    );
}
