//! Which part of the GPU's time pods have.

use std::time::{Duration, Instant};

use bursar_compute::holder::Holder;
use bursar_compute::node::DriverNode;

use crate::fixture::{FakeAgent, GPU, Lab, near, pids, pod, wait_until};

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

#[test]
fn pod_with_one_of_four_processes_busy_has_its_part() {
    let mut lab = Lab::new();
    let idle = [lab.idle(), lab.idle(), lab.idle()];
    let clients = [lab.busy(), lab.busy()];
    let (one, other) = (clients[0].pid(), clients[1].pid());
    let four = [pids(&idle), vec![one]].concat();
    let mut agent = FakeAgent::start(&lab);
    let report = agent.order(&[pod("a", Some(50), &four), pod("b", Some(50), &[other])]);
    assert_eq!(report.pods["a"].groups, 4);
    let part = lab.part(&four, || agent.mark_active(&[one, other]));
    assert!(near(part, 0.5), "{part}");
}

#[test]
fn pod_that_hides_its_activity_has_its_part_once_it_is_doubted() {
    let mut lab = Lab::new();
    let clients = [(); 4].map(|()| lab.busy());
    let (four, other) = (pids(&clients), lab.busy());
    let mut node = DriverNode::open(&GPU.parse().unwrap(), &lab.device()).unwrap();
    let mut holder = Holder::new(Duration::from_millis(20));
    let mut pods = vec![
        pod("a", Some(50), &four),
        pod("b", Some(50), &[other.pid()]),
    ];
    holder.order(&mut node, pods.clone(), Instant::now());
    // All four have work, and the shim tells of one.
    let told = [four[0], other.pid()].into_iter().collect();
    let part = lab.part(&four, || {
        holder.mark_active(&mut node, &told, Instant::now());
        holder.watch(&mut node, false, Instant::now());
    });
    assert!(part > 0.6, "{part}");
    pods[0].is_doubted = true;
    holder.order(&mut node, pods, Instant::now());
    let part = lab.part(&four, || {
        holder.mark_active(&mut node, &told, Instant::now());
        holder.watch(&mut node, false, Instant::now());
    });
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
    assert!(report.pods["a"].changed >= 5, "{report:?}");
    assert_eq!(report.pods["b"].changed, 0);
}
