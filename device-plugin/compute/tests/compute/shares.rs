//! Which part of the GPU's time pods have.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use crate::fixture::{FakeAgent, GPU, Lab, built, near, pids, pod, wait_until};

#[test]
fn weights_divide_the_time_of_busy_pods() {
    let mut lab = Lab::new();
    let clients = [lab.busy(), lab.busy()];
    let (one, other) = (clients[0].pid(), clients[1].pid());
    let mut agent = FakeAgent::start(&lab);
    let report = agent.order(&[pod("a", Some(75), &[one]), pod("b", Some(25), &[other])]);
    assert_eq!((report.known, report.in_use), (8, Some(14)));
    assert_eq!(report.pods["a"].groups, 1);
    let part = lab.part(&[one], || agent.mark_active(&[one, other]));
    assert!(near(part, 0.75), "{part}");
    assert_eq!([lab.slice(one), lab.slice(other)], [15_000, 5_000]);
}

#[test]
fn inert_driver_notes_slices_and_shares_evenly() {
    let mut lab = Lab::new();
    lab.module.set_inert(true).unwrap();
    let clients = [lab.busy(), lab.busy()];
    let (one, other) = (clients[0].pid(), clients[1].pid());
    let mut agent = FakeAgent::start(&lab);
    agent.order(&[pod("a", Some(94), &[one]), pod("b", Some(6), &[other])]);
    let part = lab.part(&[one], || agent.mark_active(&[one, other]));
    // The slices read back say nothing about the effect.
    assert_eq!([lab.slice(one), lab.slice(other)], [18_800, 1_200]);
    assert!(near(part, 0.5), "{part}");
}

/// A process of the agent's effect test. Dropping the load kills the process.
struct Load {
    child: Child,
    finished: Arc<AtomicU64>,
}

impl Load {
    fn start(lab: &Lab) -> Load {
        let mut command = lab.machine.command(built().join("bursar-provisioner"));
        command.args(["compute-load", "--gpu", GPU]);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let finished = Arc::new(AtomicU64::new(0));
        let (told, lines) = (Arc::clone(&finished), child.stdout.take().unwrap());
        thread::spawn(move || {
            for line in BufReader::new(lines).lines().map_while(Result::ok) {
                let number: String = line.chars().filter(char::is_ascii_digit).collect();
                told.store(number.parse().unwrap(), Relaxed);
            }
        });
        Load { child, finished }
    }

    fn finished(&self) -> u64 {
        self.finished.load(Relaxed)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn loads_of_the_effect_test_finish_work_by_slices_with_effect() {
    for is_inert in [false, true] {
        let mut lab = Lab::new();
        lab.module.set_inert(is_inert).unwrap();
        let loads = [Load::start(&lab), Load::start(&lab)];
        wait_until(|| loads.iter().all(|load| load.finished() > 0));
        let both = [loads[0].child.id(), loads[1].child.id()];
        let mut agent = FakeAgent::start(&lab);
        agent.order(&[
            pod("a", Some(94), &both[..1]),
            pod("b", Some(6), &both[1..]),
        ]);
        agent.mark_active(&both);
        thread::sleep(Duration::from_millis(200));
        let mut ratio = || {
            let before = [loads[0].finished(), loads[1].finished()];
            lab.part(&both, || agent.mark_active(&both));
            let after = [loads[0].finished(), loads[1].finished()];
            let [more, less] = [0, 1].map(|load| (after[load] - before[load]) as f64);
            more / less.max(1.0)
        };
        // Other programs of this machine take time from the one load or the other.
        let mut ratios = [ratio(), ratio(), ratio()];
        ratios.sort_by(f64::total_cmp);
        println!("inert {is_inert}: {ratios:?}");
        assert_eq!(ratios[1] < 1.5, is_inert, "{ratios:?}");
        assert_eq!(ratios[1] > 8.0, !is_inert, "{ratios:?}");
    }
}

#[test]
fn pod_with_one_of_four_processes_busy_has_its_part() {
    let mut lab = Lab::new();
    let idle = [lab.idle(), lab.idle(), lab.idle()];
    let clients = [lab.busy(), lab.busy()];
    let (one, other) = (clients[0].pid(), clients[1].pid());
    let four = [pids(&idle), vec![one]].concat();
    let mut agent = FakeAgent::start(&lab);
    let pods = [pod("a", Some(50), &four), pod("b", Some(50), &[other])];
    agent.find(&pods, &[4, 1]);
    let part = lab.part(&four, || agent.mark_active(&[one, other]));
    assert!(near(part, 0.5), "{part}");
}

#[test]
fn hidden_groups_are_more_in_use_than_known() {
    let lab = Lab::new();
    let mut clients = [lab.idle(), lab.idle()];
    let pods = [pod("a", Some(50), &pids(&clients))];
    let mut agent = FakeAgent::start(&lab);
    let before = agent.order(&pods);
    clients[0]
        .request(&format!("rm-groups {}", 0x7000_0000))
        .unwrap();
    let after = agent.order(&pods);
    assert_eq!((before.known, after.known), (8, 8));
    assert_eq!([before.in_use, after.in_use], [Some(14), Some(18)]);
}

#[test]
fn tenants_own_slice_is_set_back_and_counted() {
    let mut lab = Lab::new();
    let mut clients = [lab.busy(), lab.busy()];
    let (one, other) = (clients[0].pid(), clients[1].pid());
    let pods = [pod("a", Some(50), &[one]), pod("b", Some(50), &[other])];
    let mut agent = FakeAgent::start(&lab);
    agent.order(&pods);
    agent.mark_active(&[one, other]);
    wait_until(|| lab.slice(one) == 10_000);
    let group = lab.working(one).remove(0);
    let request = format!("rm-slice {} {} 100000", group.client, group.handle);
    let part = lab.part(&[one], || {
        clients[0].request(&request).unwrap();
        agent.mark_active(&[one, other]);
    });
    assert!(near(part, 0.5), "{part}");
    let report = agent.order(&pods);
    assert!(report.changed[&one] >= 5, "{report:?}");
    assert_eq!(report.changed.get(&other), None);
}
