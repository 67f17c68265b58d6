//! Maps the credit page: memory that one process and the agent share.
//!
//! The agent creates the page as a memfd that is sealed against shrinking, growing and further
//! seals. So no tenant can turn the agent's next access into a SIGBUS. The agent sends the
//! descriptor with its welcome. Both sides access the page through atomics only: whatever the other
//! side writes is a value, never undefined behaviour. A forked child has no mapping of the page
//! (`MADV_DONTFORK`).

#![allow(unsafe_code)]

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::atomic_credit::AtomicCredit;
use crate::credit::{CreditError, CreditWord};
use crate::fence::Fence;
use crate::units::Units;

/// Bytes of a page, and of its mapping.
pub const PAGE_BYTES: usize = 4096;

/// Accounts that a page can hold: more GPUs than a node has, and managed memory.
pub const MAX_SLOTS: usize = 63;

const MAGIC: u64 = u64::from_le_bytes(*b"bursarCP");

/// The version of the layout. It begins at 3, because agents wrote the protocol's version before.
const LAYOUT: u32 = 3;

/// The seals of a page fix its size and its seals. The page stays writable.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Why a page could not be created or mapped.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// The memfd could not be created.
    #[error("create the credit page: {0}")]
    Create(#[source] std::io::Error),
    /// The memfd could not be mapped.
    #[error("map the credit page: {0}")]
    Map(#[source] std::io::Error),
    /// The descriptor is not a sealed page of this layout.
    #[error("the descriptor is not a sealed credit page: {0}")]
    NotAPage(&'static str),
}

/// One account of a page: one GPU's device memory, or managed memory.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct AccountSlot {
    word: AtomicCredit<AtomicU64>,
    quota: AtomicU32,
    others: AtomicU32,
    siblings: AtomicU32,
    exported: AtomicU32,
    context: AtomicU32,
    evictable: AtomicU32,
}

impl AccountSlot {
    /// Returns the current credit word.
    pub fn word(&self) -> CreditWord {
        self.word.word()
    }

    /// Charges `n` units by one compare-and-swap, where the credit is there and no thread competes.
    ///
    /// # Errors
    /// [`CreditError`] when the agent must be asked for credit.
    pub fn charge(&self, n: Units) -> Result<(), CreditError> {
        self.word.charge(n.0)
    }

    /// Discharges `n` units. Returns `false` for a frozen word: the caller must use the page that
    /// its process has migrated to.
    pub fn discharge(&self, n: Units) -> bool {
        self.word.discharge(n.0)
    }

    /// Adds `n` units of credit (agent). Returns `false` if the word cannot count them.
    pub fn grant(&self, n: Units) -> bool {
        self.word.grant(n.0)
    }

    /// Takes back idle credit, at most `at_most` (agent). Returns the amount.
    pub fn reclaim(&self, at_most: Units) -> Units {
        Units(self.word.reclaim(at_most.0))
    }

    /// Sets the word, before the page is sent.
    pub fn set(&self, word: CreditWord) {
        self.word.set(word);
    }

    /// Freezes the word and returns the old one: the first half of a migration to another page.
    pub fn freeze(&self) -> CreditWord {
        self.word.freeze()
    }

    /// Returns the container's quota of this account.
    pub fn quota(&self) -> Units {
        Units(self.quota.load(Ordering::Acquire)).min(Units::MAX)
    }

    /// Returns the usage of the container's other processes, as the agent last wrote it.
    pub fn others(&self) -> Units {
        Units(self.others.load(Ordering::Acquire)).min(Units::MAX)
    }

    /// Returns how many other processes of the container hold credit or use memory. With none, only
    /// this process changes the container's usage, and [`AccountSlot::others`] is exact.
    pub fn siblings(&self) -> u32 {
        self.siblings.load(Ordering::Acquire)
    }

    /// Writes the container's quota (agent).
    pub fn set_quota(&self, quota: Units) {
        self.quota.store(quota.0, Ordering::Release);
    }

    /// Writes the usage and number of the other processes (agent).
    pub fn set_others(&self, others: Units, siblings: u32) {
        self.others.store(others.0, Ordering::Release);
        self.siblings.store(siblings, Ordering::Release);
    }

    /// Returns what a context of this GPU is charged before its size was measured. Zero: contexts
    /// are not charged.
    pub fn context(&self) -> Units {
        Units(self.context.load(Ordering::Acquire)).min(Units::MAX)
    }

    /// Writes what a context is charged (agent).
    pub fn set_context(&self, units: Units) {
        self.context.store(units.0, Ordering::Release);
    }

    /// Returns the managed memory on this GPU that the driver moves away for device memory. The
    /// driver's figure of free memory lacks these bytes.
    pub fn evictable(&self) -> Units {
        Units(self.evictable.load(Ordering::Acquire)).min(Units::MAX)
    }

    /// Writes the managed memory that the driver moves away (agent).
    pub fn set_evictable(&self, units: Units) {
        self.evictable.store(units.0, Ordering::Release);
    }

    /// Returns how much of its usage the process says it has exported. Descriptors or other
    /// processes may keep that memory after its exit (facts F4, F13).
    pub fn exported(&self) -> Units {
        Units(self.exported.load(Ordering::Acquire)).min(Units::MAX)
    }

    /// Sets the exported amount, before the page is sent or used.
    pub fn set_exported(&self, exported: Units) {
        self.exported.store(exported.0, Ordering::Release);
    }

    /// Counts `n` more units as exported, before another process can hold them (process).
    pub fn export(&self, n: Units) {
        self.update_exported(|exported| exported.saturating_add(n));
    }

    /// Counts `n` fewer units as exported, because no other process can hold them (process).
    pub fn unexport(&self, n: Units) {
        self.update_exported(|exported| exported.saturating_sub(n));
    }

    fn clear(&self) {
        self.set(CreditWord {
            granted: 0,
            used: 0,
        });
        self.set_quota(Units::ZERO);
        self.set_others(Units::ZERO, 0);
        self.set_exported(Units::ZERO);
        self.set_context(Units::ZERO);
        self.set_evictable(Units::ZERO);
    }

    fn update_exported(&self, step: impl Fn(Units) -> Units) {
        let step = |bits| step(Units(bits).min(Units::MAX)).0;
        self.exported
            .update(Ordering::AcqRel, Ordering::Relaxed, step);
    }
}

/// The layout of the shared memory.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct CreditPageLayout {
    magic: AtomicU64,
    version: AtomicU32,
    slots: AtomicU32,
    fence: AtomicU64,
    reserved: [AtomicU64; 5],
    slot: [AccountSlot; MAX_SLOTS],
}

const _: () =
    assert!(size_of::<CreditPageLayout>() == PAGE_BYTES && size_of::<AccountSlot>() == 64);

impl CreditPageLayout {
    /// Returns the fence as a word of [`Fence`](crate::fence::Fence); zero without a fence.
    pub fn fence(&self) -> u64 {
        self.fence.load(Ordering::Acquire)
    }

    /// Writes the fence (agent).
    pub fn set_fence(&self, fence: Option<Fence>) {
        let word = fence.map_or(0, Fence::word);
        self.fence.store(word, Ordering::Release);
    }

    /// Returns the account at `index`, if the page has that many.
    pub fn slot(&self, index: usize) -> Option<&AccountSlot> {
        self.slot
            .get(index)
            .filter(|_| index < self.slots.load(Ordering::Relaxed) as usize)
    }
}

/// A mapping of a [`CreditPageLayout`]; dereferences to it and is unmapped when dropped.
#[derive(Debug)]
pub struct CreditPage {
    page: NonNull<CreditPageLayout>,
    /// Stored on this side, because the other side may write any number into the shared memory.
    slots: usize,
}

// SAFETY: the mapping belongs to no thread, and everything in it is atomic.
unsafe impl Send for CreditPage {}
// SAFETY: everything in the mapping is atomic.
unsafe impl Sync for CreditPage {}

impl CreditPage {
    /// Creates a sealed page with `slots` accounts and maps it (agent). The descriptor is sent to
    /// the process with the welcome.
    ///
    /// # Errors
    /// [`PageError`] when the kernel refuses the memfd, its seals or the mapping, or for more than
    /// [`MAX_SLOTS`].
    pub fn create(slots: usize) -> Result<(CreditPage, OwnedFd), PageError> {
        let create = |errno: rustix::io::Errno| PageError::Create(errno.into());
        let fd = rustix::fs::memfd_create(
            c"bursar-credit",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )
        .map_err(create)?;
        rustix::fs::ftruncate(&fd, PAGE_BYTES as u64).map_err(create)?;
        rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(create)?;
        Ok((CreditPage::recycle(&fd, slots)?, fd))
    }

    /// Maps a page of [`create`](CreditPage::create) and resets it for another process, after the
    /// page's process has exited (agent).
    ///
    /// # Errors
    /// [`PageError`] when the kernel refuses the mapping, or for more than [`MAX_SLOTS`].
    pub fn recycle(fd: impl AsFd, slots: usize) -> Result<CreditPage, PageError> {
        let count = u32::try_from(slots).ok().filter(|_| slots <= MAX_SLOTS);
        let count = count.ok_or(PageError::NotAPage("more accounts than a page has"))?;
        let mapped = CreditPage::map(&fd, slots)?;
        mapped.set_fence(None);
        for slot in &mapped.shared().slot {
            slot.clear();
        }
        mapped.shared().slots.store(count, Ordering::Relaxed);
        mapped.version.store(LAYOUT, Ordering::Relaxed);
        mapped.magic.store(MAGIC, Ordering::Release);
        Ok(mapped)
    }

    /// Maps a page that the agent sent (shim).
    ///
    /// # Errors
    /// [`PageError::NotAPage`] when the descriptor lacks a seal or has another size or layout, so
    /// that no later access can fault. [`PageError::Map`] when the kernel refuses.
    pub fn open(fd: impl AsFd) -> Result<CreditPage, PageError> {
        let seals =
            rustix::fs::fcntl_get_seals(&fd).map_err(|_| PageError::NotAPage("no seals"))?;
        if !seals.contains(SEALS) {
            return Err(PageError::NotAPage("its size is not sealed"));
        }
        let size = rustix::fs::fstat(&fd)
            .map_err(|errno| PageError::Map(errno.into()))?
            .st_size;
        if size != PAGE_BYTES as i64 {
            return Err(PageError::NotAPage("another size"));
        }
        let mut mapped = CreditPage::map(&fd, 0)?;
        if mapped.magic.load(Ordering::Acquire) != MAGIC {
            return Err(PageError::NotAPage("another layout"));
        }
        if mapped.version.load(Ordering::Relaxed) != LAYOUT {
            return Err(PageError::NotAPage("another version of the layout"));
        }
        mapped.slots = mapped.shared().slots.load(Ordering::Relaxed) as usize;
        Ok(mapped)
    }

    /// Returns the account at `index`, if the page was created or opened with that many.
    pub fn slot(&self, index: usize) -> Option<&AccountSlot> {
        self.slot.get(index).filter(|_| index < self.slots)
    }

    /// Keeps the mapping for the rest of the process. A fast path may hold on to a page that its
    /// process has migrated from (one page a restart of the agent).
    pub fn leak(self) -> &'static CreditPageLayout {
        let page = self.page;
        std::mem::forget(self);
        // SAFETY: the mapping is valid and, with `self` forgotten, never unmapped.
        unsafe { page.as_ref() }
    }

    fn shared(&self) -> &CreditPageLayout {
        self
    }

    fn map(fd: impl AsFd, slots: usize) -> Result<CreditPage, PageError> {
        let map = |errno: rustix::io::Errno| PageError::Map(errno.into());
        // SAFETY: a fresh mapping at an address that the kernel chooses aliases nothing.
        let address = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                PAGE_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                0,
            )
        }
        .map_err(map)?;
        let page = NonNull::new(address.cast::<CreditPageLayout>())
            .ok_or(PageError::NotAPage("mapped at zero"))?;
        let mapped = CreditPage { page, slots };
        // SAFETY: the range is the mapping just made; a forked child only lacks it.
        unsafe { rustix::mm::madvise(address, PAGE_BYTES, Advice::LinuxDontFork) }.map_err(map)?;
        Ok(mapped)
    }
}

impl std::ops::Deref for CreditPage {
    type Target = CreditPageLayout;

    fn deref(&self) -> &CreditPageLayout {
        // SAFETY: the mapping is PAGE_BYTES long, aligned, and lives as long as `self`. Every field
        // is atomic, so the other side's writes are no data race. Seals keep it from shrinking.
        unsafe { self.page.as_ref() }
    }
}

impl Drop for CreditPage {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map`, and no reference outlives `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.page.as_ptr().cast(), PAGE_BYTES) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agent_and_shim_see_one_word() {
        let (agent, fd) = CreditPage::create(2).unwrap();
        let shim = CreditPage::open(&fd).unwrap();
        assert!(agent.slot(0).unwrap().grant(Units(10)));
        let slot = shim.slot(0).unwrap();
        assert_eq!(slot.charge(Units(11)), Err(CreditError::Short(1)));
        assert_eq!(slot.charge(Units(7)), Ok(()));
        assert_eq!(
            agent.slot(0).unwrap().word(),
            CreditWord {
                granted: 10,
                used: 7
            }
        );
        assert_eq!(agent.slot(0).unwrap().reclaim(Units(100)), Units(3));
        assert_eq!(slot.charge(Units(1)), Err(CreditError::Short(1)));
        assert!(slot.discharge(Units(7)));
        assert!(shim.slot(2).is_none());
        assert_eq!(shim.fence(), 0);
        agent.set_fence(Some(Fence::Drained));
        assert_eq!(Fence::of(shim.fence()), Some(Fence::Drained));
    }

    #[test]
    fn exported_units_are_counted_and_never_negative() {
        let (agent, fd) = CreditPage::create(1).unwrap();
        let shim = CreditPage::open(&fd).unwrap();
        let slot = shim.slot(0).unwrap();
        slot.export(Units(7));
        assert_eq!(agent.slot(0).unwrap().exported(), Units(7));
        slot.unexport(Units(3));
        assert_eq!(agent.slot(0).unwrap().exported(), Units(4));
        slot.unexport(Units(9));
        assert_eq!(agent.slot(0).unwrap().exported(), Units::ZERO);
        slot.export(Units(u32::MAX));
        assert_eq!(agent.slot(0).unwrap().exported(), Units::MAX);
        assert_eq!(
            agent.slot(0).unwrap().word(),
            CreditWord {
                granted: 0,
                used: 0
            }
        );
    }

    #[test]
    fn page_keeps_its_accounts_when_a_tenant_overwrites_the_count() {
        let (agent, fd) = CreditPage::create(2).unwrap();
        let shim = CreditPage::open(&fd).unwrap();
        shim.shared().slots.store(0, Ordering::Relaxed);
        assert!(agent.slot(1).is_some());
        shim.shared().slots.store(u32::MAX, Ordering::Relaxed);
        assert!(agent.slot(2).is_none());
    }

    #[test]
    fn tenant_cannot_resize_or_seal_the_page() {
        let (_agent, fd) = CreditPage::create(1).unwrap();
        assert!(rustix::fs::ftruncate(&fd, 0).is_err());
        assert!(rustix::fs::ftruncate(&fd, 8192).is_err());
        assert!(rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE).is_err());
    }

    #[test]
    fn page_of_another_version_is_not_opened() {
        let (page, fd) = CreditPage::create(1).unwrap();
        assert!(CreditPage::open(&fd).is_ok());
        page.version.store(LAYOUT + 1, Ordering::Relaxed);
        assert!(matches!(
            CreditPage::open(&fd),
            Err(PageError::NotAPage("another version of the layout"))
        ));
    }

    #[test]
    fn descriptor_without_the_seals_is_not_mapped() {
        let fd =
            rustix::fs::memfd_create(c"plain", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
                .unwrap();
        rustix::fs::ftruncate(&fd, PAGE_BYTES as u64).unwrap();
        assert!(matches!(CreditPage::open(&fd), Err(PageError::NotAPage(_))));
        rustix::fs::fcntl_add_seals(&fd, SEALS).unwrap();
        assert!(matches!(
            CreditPage::open(&fd),
            Err(PageError::NotAPage("another layout"))
        ));
    }

    #[test]
    fn racing_threads_charge_exactly_the_granted_units() {
        let (agent, fd) = CreditPage::create(1).unwrap();
        agent.slot(0).unwrap().grant(Units(1000));
        let shim = CreditPage::open(&fd).unwrap();
        let charged: u32 = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        (0..1000)
                            .filter(|_| shim.slot(0).unwrap().charge(Units(3)).is_ok())
                            .count()
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap() as u32)
                .sum()
        });
        assert_eq!(charged, 333);
        assert_eq!(agent.slot(0).unwrap().word().idle(), 1);
    }

    #[test]
    fn migration_to_another_page_loses_no_unit() {
        let (old, _) = CreditPage::create(1).unwrap();
        let (new, _) = CreditPage::create(1).unwrap();
        old.slot(0).unwrap().grant(Units(10));
        old.slot(0).unwrap().charge(Units(4)).unwrap();
        new.slot(0).unwrap().set(old.slot(0).unwrap().freeze());
        assert_eq!(
            old.slot(0).unwrap().charge(Units(1)),
            Err(CreditError::Frozen)
        );
        assert!(!old.slot(0).unwrap().discharge(Units(1)));
        assert!(new.slot(0).unwrap().discharge(Units(1)));
        assert_eq!(
            new.slot(0).unwrap().word(),
            CreditWord {
                granted: 10,
                used: 3
            }
        );
    }
}
