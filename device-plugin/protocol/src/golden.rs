//! Holds the bytes of every message, and of the credit page, against those of released versions.
//!
//! The patterns of a list are the arms of a `match` without a wildcard, so that a new variant of a
//! message does not compile before it has a sample.

/// One sample of each variant of a type, with its name.
macro_rules! samples {
    ($kind:ty: $($name:literal, $pattern:pat => $sample:expr;)+) => {{
        fn name(sample: &$kind) -> &'static str {
            match sample {
                $($pattern => $name,)+
            }
        }
        let samples: Vec<(&'static str, $kind)> = vec![$(($name, $sample)),+];
        for (expected, sample) in &samples {
            assert_eq!(name(sample), *expected, "{sample:?}");
        }
        samples
    }};
}

mod tenant;

use std::fmt::Debug;
use std::os::fd::AsFd;

use crate::credit::CreditWord;
use crate::credit_page::CreditPage;
use crate::fdstore::{Blob, FdStoreRequest, FdStoreResponse, Refusal, StoredLease};
use crate::fence::Fence;
use crate::messages::signed_token::{NodePublicKey, UnsignedToken};
use crate::messages::token::{Generations, MemoryId};
use crate::messages::{HEADER, Message};
use crate::provisioner::{ProvisionerRequest, ProvisionerResponse};
use crate::testing::assert_frames;
use crate::units::Units;

/// Holds the frames of these messages against the golden ones, and parses them again.
fn assert_messages<M: Message + Debug + PartialEq>(protocol: &str, samples: &[(&str, M)]) {
    let frames = samples.iter().map(|(name, message)| {
        let frame = message.frame();
        assert_eq!(M::parse(&frame[HEADER..]).as_ref(), Ok(message));
        ((*name).to_owned(), frame)
    });
    assert_frames(protocol, &frames.collect::<Vec<_>>());
}

#[test]
fn fd_store_requests_have_their_golden_frames() {
    let blob = || Blob::try_from("{\"bytes\":1}".to_owned()).unwrap();
    let samples = samples!(FdStoreRequest:
        "Hello", FdStoreRequest::Hello { .. } => FdStoreRequest::Hello { version: 2 };
        "Put", FdStoreRequest::Put { .. } => FdStoreRequest::Put { lease: 1, blob: blob() };
        "Update", FdStoreRequest::Update { .. } => FdStoreRequest::Update {
            lease: u64::MAX,
            blob: blob(),
        };
        "Get", FdStoreRequest::Get { .. } => FdStoreRequest::Get { lease: 2 };
        "Drop", FdStoreRequest::Drop { .. } => FdStoreRequest::Drop { lease: 3 };
        "List", FdStoreRequest::List { .. } => FdStoreRequest::List { from: 4 };
    );
    assert_messages("fdstore.request", &samples);
}

#[test]
fn fd_store_responses_have_their_golden_frames() {
    use FdStoreResponse::Refused;
    let lease = || StoredLease {
        lease: 5,
        blob: Blob::try_from("{}".to_owned()).unwrap(),
    };
    let samples = samples!(FdStoreResponse:
        "Ready", FdStoreResponse::Ready { .. } => FdStoreResponse::Ready {
            version: 2,
            leases: 3,
            room: 9,
        };
        "Stored", FdStoreResponse::Stored => FdStoreResponse::Stored;
        "Lease", FdStoreResponse::Lease(_) => FdStoreResponse::Lease(lease());
        "Dropped", FdStoreResponse::Dropped => FdStoreResponse::Dropped;
        "Listed", FdStoreResponse::Listed { .. } => FdStoreResponse::Listed {
            leases: vec![lease(), lease()],
        };
        "Refused.Missing", Refused(Refusal::Missing) => Refused(Refusal::Missing);
        "Refused.Exists", Refused(Refusal::Exists) => Refused(Refusal::Exists);
        "Refused.Full", Refused(Refusal::Full) => Refused(Refusal::Full);
        "Refused.NoDescriptor", Refused(Refusal::NoDescriptor) => Refused(Refusal::NoDescriptor);
        "Refused.Version", Refused(Refusal::Version) => Refused(Refusal::Version);
        "Refused.NoHello", Refused(Refusal::NoHello) => Refused(Refusal::NoHello);
        "Refused.Unknown", Refused(Refusal::Unknown) => Refused(Refusal::Unknown);
    );
    assert_messages("fdstore.response", &samples);
}

#[test]
fn provisioner_requests_have_their_golden_frames() {
    let samples = samples!(ProvisionerRequest:
        "Create", ProvisionerRequest::Create { .. } => ProvisionerRequest::Create {
            bytes: 1 << 30,
            lendable: 2 << 30,
        };
        "AwaitScrub", ProvisionerRequest::AwaitScrub { .. } => ProvisionerRequest::AwaitScrub {
            bytes: 1 << 21,
        };
    );
    assert_messages("provisioner.request", &samples);
}

#[test]
fn provisioner_responses_have_their_golden_frames() {
    let samples = samples!(ProvisionerResponse:
        "Ready", ProvisionerResponse::Ready { .. } => ProvisionerResponse::Ready {
            driver: 13_000,
            granularity: 1 << 21,
            total: 141 << 30,
            concurrent_managed_access: true,
        };
        "Created", ProvisionerResponse::Created { .. } => ProvisionerResponse::Created {
            bytes: 1 << 30,
        };
        "Scrubbed", ProvisionerResponse::Scrubbed => ProvisionerResponse::Scrubbed;
        "Failed", ProvisionerResponse::Failed { .. } => ProvisionerResponse::Failed {
            code: 2,
            call: "cuMemCreate".to_owned(),
        };
    );
    assert_messages("provisioner.response", &samples);
}

#[test]
fn fences_have_their_golden_words() {
    let samples = samples!(Fence:
        "Drained", Fence::Drained => Fence::Drained;
        "Poisoned", Fence::Poisoned(_) => Fence::Poisoned(700);
    );
    let words = samples.iter().map(|(name, fence)| {
        assert_eq!(Fence::of(fence.word()), Some(*fence));
        ((*name).to_owned(), fence.word().to_le_bytes().to_vec())
    });
    assert_frames("fence", &words.collect::<Vec<_>>());
}

/// The node's public key signs tokens of format 2, which other programs verify.
#[test]
fn memory_token_has_its_golden_bytes() {
    let memory = MemoryId {
        node: "node-a".to_owned(),
        gpu: "GPU-5e000000-0000-0000-0000-000000000001".to_owned(),
        container: 1,
        generations: Generations {
            gpu: 2,
            process: 3,
            lease: 4,
        },
        block: 5,
    };
    let token = UnsignedToken::new(&NodePublicKey([7; 32]), &memory);
    assert_eq!(MemoryId::decode(&memory.encode()).as_ref(), Ok(&memory));
    assert_frames(
        "signed-token",
        &[("Format2".to_owned(), token.signed_bytes())],
    );
}

/// A page with an account of each field, as far as its bytes are not zero.
fn page_bytes(fd: impl AsFd) -> Vec<u8> {
    let mut bytes = vec![0; 64 * 3];
    rustix::io::pread(fd, &mut bytes, 0).unwrap();
    bytes
}

#[test]
fn credit_page_has_its_golden_layout() {
    let (page, fd) = CreditPage::create(2).unwrap();
    page.set_fence(Some(Fence::Poisoned(719)));
    let slot = page.slot(0).unwrap();
    slot.set(CreditWord {
        granted: 0x11,
        used: 0x05,
    });
    slot.set_quota(Units(0x22));
    slot.set_others(Units(0x33), 4);
    slot.set_exported(Units(0x02));
    slot.set_context(Units(0x55));
    slot.set_evictable(Units(0x66));
    let written = page_bytes(&fd);
    assert_frames("page", &[("Layout3".to_owned(), written.clone())]);

    let (_blank, fd) = CreditPage::create(1).unwrap();
    rustix::io::pwrite(&fd, &written, 0).unwrap();
    let shim = CreditPage::open(&fd).unwrap();
    let [slot, _] = [0, 1].map(|index| shim.slot(index).unwrap());
    assert_eq!(Fence::of(shim.fence()), Some(Fence::Poisoned(719)));
    let CreditWord { granted, used } = slot.word();
    assert_eq!((granted, used), (0x11, 0x05));
    let counts = [
        slot.quota(),
        slot.others(),
        slot.exported(),
        slot.context(),
        slot.evictable(),
    ];
    assert_eq!(counts, [0x22, 0x33, 0x02, 0x55, 0x66].map(Units));
    assert_eq!(slot.siblings(), 4);
    assert!(shim.slot(2).is_none());
}
