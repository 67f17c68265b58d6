//! Which processes end, and what stays of them.

use std::time::{Duration, Instant};

use crate::fixture::{FakeAgent, Lab, near, pod, wait_until};

#[test]
fn killed_tenant_leaves_no_memory_and_no_group() {
    let mut lab = Lab::new();
    let sim = lab.machine.sim().unwrap();
    let mut agent = FakeAgent::start(&lab);
    let other = lab.busy();
    let alone = sim.usage(0).used;
    let mut waits = Vec::new();
    for _ in 0..5 {
        let client = lab.busy();
        let pid = client.pid();
        let pods = [
            pod("a", Some(50), &[pid]),
            pod("b", Some(50), &[other.pid()]),
        ];
        agent.order(&pods);
        // The holder looks at both each 10 ms from now on.
        agent.mark_active(&[pid, other.pid()]);
        wait_until(|| lab.slice(pid) == 10_000);
        client.kill();
        let begun = Instant::now();
        wait_until(|| sim.usage(0).used == alone && lab.working(pid).is_empty());
        waits.push(begun.elapsed());
        let report = agent.order(&pods);
        assert_eq!((report.pods["a"].groups, report.known), (0, 4));
    }
    waits.sort();
    println!("memory is free {waits:?} after the end");
    assert!(waits[2] < Duration::from_secs(1), "{waits:?}");
}

#[test]
fn slices_stay_without_the_holder_and_the_next_takes_them_over() {
    let mut lab = Lab::new();
    let clients = [lab.busy(), lab.busy()];
    let (one, other) = (clients[0].pid(), clients[1].pid());
    let pods = [pod("a", Some(75), &[one]), pod("b", Some(25), &[other])];
    let mut agent = FakeAgent::start(&lab);
    agent.order(&pods);
    agent.mark_active(&[one, other]);
    wait_until(|| lab.slice(one) == 15_000 && lab.slice(other) == 5_000);
    drop(agent);
    let part = lab.part(&[one], || {});
    assert!(near(part, 0.75), "{part}");
    let mut agent = FakeAgent::start(&lab);
    let report = agent.order(&pods);
    assert_eq!((report.known, report.changed.len()), (8, 0));
    let part = lab.part(&[one], || agent.mark_active(&[one, other]));
    assert!(near(part, 0.75), "{part}");
    // Other weights count from the next order on.
    let pods = [pod("a", Some(25), &[one]), pod("b", Some(75), &[other])];
    agent.order(&pods);
    let part = lab.part(&[one], || agent.mark_active(&[one, other]));
    assert!(near(part, 0.25), "{part}");
}

#[test]
fn process_that_begins_a_context_later_is_found() {
    let mut lab = Lab::new();
    let mut agent = FakeAgent::start(&lab);
    let mut late = lab.machine.spawn_client().unwrap();
    let other = lab.busy();
    let pods = [
        pod("a", Some(80), &[late.pid()]),
        pod("b", Some(20), &[other.pid()]),
    ];
    assert_eq!(agent.order(&pods).pods["a"].groups, 0);
    late.request("context 0").unwrap();
    late.request("launch spin 0").unwrap();
    assert_eq!(agent.order(&pods).pods["a"].groups, 1);
    let both = [late.pid(), other.pid()];
    let part = lab.part(&[late.pid()], || agent.mark_active(&both));
    assert!(near(part, 0.8), "{part}");
    // A second context of the same process, beside the first.
    late.request("new-context 0").unwrap();
    assert_eq!(agent.order(&pods).pods["a"].groups, 2);
}
