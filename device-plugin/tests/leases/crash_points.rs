//! Kills the agent, the fd store or a provisioner before and after each of its steps while leases
//! come and go: each rename, fsync and unlink, and each send of a message.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use crate::common::kubelet::Pod;
use crate::common::{eventually, steps};
use crate::fixture::{Fixture, GIB, open_retrying, read_lease};
use crate::machine::{GPU, TWO_GPUS};
use crate::tenant_process::{Opened, Tenant};

/// The content of the lease that stays.
const MARK: u64 = 42;
/// The steps between two deaths in the default tier, which has no common factor with the two steps
/// of each call.
const STRIDE: usize = 15;

/// The process that dies.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Victim {
    Agent,
    /// An agent that finds a lease in the fd store.
    NextAgent,
    FdStore,
    /// A GPU's first provisioner.
    Provisioner,
}

/// Each victim with the fewest steps of its run. With fewer ones the library counts nothing.
const VICTIMS: [(Victim, usize); 4] = [
    (Victim::Agent, 40),
    (Victim::NextAgent, 8),
    (Victim::FdStore, 12),
    (Victim::Provisioner, 6),
];

/// A pod whose process uses leases, and returns the lease that was committed.
type Use = (Pod, JoinHandle<Option<u64>>);

/// Commits a lease, and commits and discards another one. Returns the first one, unless its commit
/// was not answered.
fn commit_and_discard(mut tenant: Tenant) -> Option<u64> {
    let kept = match open_retrying(&mut tenant, "kept", 2 * GIB) {
        Ok(Opened::Write { lease, token }) => {
            let answer = tenant.commit(lease, token, MARK);
            (answer == "committed").then_some(lease)
        }
        // The answer to its first question was lost.
        Err(why) if why.contains("Writing") => None,
        other => panic!("{other:?}"),
    };
    if let Ok(Opened::Write { lease, token }) = open_retrying(&mut tenant, "gone", GIB) {
        tenant.commit(lease, token, MARK);
        tenant.discard(lease);
    }
    kept
}

async fn use_leases(fixture: &Fixture, uses: &RefCell<Option<Use>>) -> Option<()> {
    fixture.machine.kubelet.until_allocatable(GPU, 32).await;
    let pod = fixture.machine.try_run("a", 8).await?;
    let tenant = fixture.tenant(&pod);
    let thread = thread::spawn(move || commit_and_discard(tenant));
    until_ended((pod, thread), uses).await;
    Some(())
}

async fn until_ended(new: Use, uses: &RefCell<Option<Use>>) {
    *uses.borrow_mut() = Some(new);
    let is_finished = || {
        uses.borrow()
            .as_ref()
            .is_none_or(|(_, it)| it.is_finished())
    };
    eventually("the process has used its leases", is_finished).await;
}

/// Lets the first provisioner of each GPU die at this step. Which GPU has the pod is not known.
fn let_provisioners_die(fixture: &Fixture, library: &Path, step: usize) {
    let (root, library) = (fixture.machine.root.path().display(), library.display());
    let first = format!(
        "#!/bin/sh\n\
         if [ \"$1\" = --gpu ] && mkdir {root}/first-$2 2>/dev/null; then\n\
         echo $$ > {root}/first-$2/pid\n\
         export LD_PRELOAD={library} BURSAR_STEPS={root}/first-$2/steps BURSAR_STEP={step}\n\
         fi\n",
    );
    let script = fixture.machine.path("provisioner");
    let text = fs::read_to_string(&script).unwrap();
    fs::write(&script, text.replacen("#!/bin/sh\n", &first, 1)).unwrap();
}

/// The folders of [`let_provisioners_die`].
fn provisioners(fixture: &Fixture) -> impl Iterator<Item = PathBuf> {
    let uuids = TWO_GPUS.split('"').filter(|word| word.starts_with("GPU-"));
    uuids.map(|gpu| fixture.machine.path(&format!("first-{gpu}")))
}

fn are_provisioners_running(fixture: &Fixture) -> bool {
    provisioners(fixture).all(|folder| {
        let pid = fs::read_to_string(folder.join("pid")).unwrap_or_default();
        pid.trim().parse().map_or(true, steps::is_running)
    })
}

/// Lets a process die at a step. Returns the steps of one that does not die.
async fn die_at(library: &Path, victim: Victim, step: usize) -> Option<usize> {
    let mut fixture = Fixture::of(Fixture::machine(TWO_GPUS).await);
    let file = fixture.machine.path("steps");
    let uses = RefCell::new(None);
    let (mut agent, mut fdstore) = (fixture.machine.command(), fixture.fdstore_command());
    match victim {
        Victim::Agent => steps::die_at(&mut agent, library, &file, step),
        Victim::FdStore => steps::die_at(&mut fdstore, library, &file, step),
        Victim::Provisioner => let_provisioners_die(&fixture, library, step),
        Victim::NextAgent => {}
    }
    fixture.start_fdstore_with(fdstore);
    fixture.machine.start_agent_with(agent);
    let fdstore_pid = fixture.fdstore_pid().as_raw_pid().cast_unsigned();
    let has_died = match victim {
        Victim::NextAgent => {
            use_leases(&fixture, &uses).await.unwrap();
            let (pod, thread) = uses.take().unwrap();
            let kept = thread.join().unwrap();
            fixture.machine.kill_agent();
            let before = fixture.machine.registrations();
            let mut agent = fixture.machine.command();
            steps::die_at(&mut agent, library, &file, step);
            fixture.machine.start_agent_with(agent);
            let mut tenant = fixture.tenant(&pod);
            let thread = thread::spawn(move || {
                assert_eq!(read_lease(&mut tenant, "kept"), (kept.unwrap(), MARK));
                kept
            });
            let act = async {
                until_ended((pod, thread), &uses).await;
                fixture.machine.until_registered(before).await;
                Some(())
            };
            steps::until_dead(|| fixture.machine.is_agent_running(), act).await
        }
        _ => {
            let is_running = || match victim {
                Victim::FdStore => steps::is_running(fdstore_pid),
                Victim::Provisioner => are_provisioners_running(&fixture),
                _ => fixture.machine.is_agent_running(),
            };
            steps::until_dead(is_running, use_leases(&fixture, &uses)).await
        }
    };
    if !has_died {
        let of_provisioners = provisioners(&fixture).map(|folder| folder.join("steps"));
        let files = of_provisioners.chain([file]);
        return files.map(|file| steps::count(&file)).max();
    }
    let description = format!("{victim:?}, step {step}");
    match victim {
        Victim::Agent | Victim::NextAgent => fixture.machine.replace_dead_agent(&description).await,
        Victim::FdStore => {
            fixture.kill_fdstore();
            fixture.start_fdstore();
        }
        Victim::Provisioner => {}
    }
    fixture.machine.kubelet.until_allocatable(GPU, 32).await;
    if let Some((pod, thread)) = uses.into_inner() {
        let kept = thread.join().unwrap();
        let again = open_retrying(&mut fixture.tenant(&pod), "kept", 2 * GIB);
        let is_right = match (&again, kept) {
            (Ok(Opened::Ready { lease, mark }), _) => {
                *mark == MARK && kept.is_none_or(|kept| kept == *lease)
            }
            (Ok(Opened::Write { .. }), None) => true,
            // Leases end with the fd store.
            (Ok(Opened::Write { lease, .. }), Some(kept)) => {
                victim == Victim::FdStore && *lease > kept
            }
            (Err(_), _) => false,
        };
        assert!(is_right, "{description}: {kept:?}, then {again:?}");
    }
    fixture.machine.assert_clean(&description).await;
    None
}

async fn die_at_each(stride: usize) {
    let folder = tempfile::tempdir().unwrap();
    let library = steps::library(folder.path());
    for (victim, fewest) in VICTIMS {
        let all = die_at(&library, victim, 0).await.expect("it does not die");
        assert!(all >= fewest, "{victim:?}: only {all} steps");
        let mut deaths = 0;
        for step in (1..=all).step_by(stride) {
            deaths += usize::from(die_at(&library, victim, step).await.is_none());
        }
        println!("{victim:?}: {all} steps, {deaths} deaths");
        assert!(
            deaths * stride * 2 >= all,
            "{victim:?}: only {deaths} deaths"
        );
    }
}

#[tokio::test]
async fn process_that_dies_at_a_step_leaves_right_leases() {
    die_at_each(STRIDE).await;
}

#[tokio::test]
#[ignore = "takes minutes"]
async fn process_that_dies_at_any_step_leaves_right_leases() {
    for _ in 0..3 {
        die_at_each(1).await;
    }
}
