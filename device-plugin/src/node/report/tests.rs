use std::collections::BTreeMap;
use std::path::PathBuf;

use super::*;
use crate::gpu::Gpu;
use crate::gpu::health::Memory as GpuMemory;
use crate::kubelet::devices::{Devices, TokenHealth};
use crate::ledger::{Health as LedgerHealth, ManagedView};
use crate::metrics::Counts;
use crate::node::allocator::{Troubles, Wait};
use crate::node::checkpoint_state::{Holder, PodName};
use crate::units::{Bytes, GpuUuid, Quantum, Resource};

fn uuid() -> GpuUuid {
    "GPU-a".parse().unwrap()
}

/// One healthy GPU of 16 GiB with 10 bound and 2 kept for a waiter.
fn snapshot() -> Snapshot {
    Snapshot {
        inventory: inventory(Health::Healthy),
        view: View {
            gpus: vec![GpuView {
                uuid: uuid(),
                health: LedgerHealth::Healthy,
                capacity: Quanta(16),
                bound: Quanta(10),
                left: Bytes::gib(1),
                leaked: Bytes::ZERO,
                withheld: Bytes::ZERO,
                kept: Bytes::ZERO,
                free: Quanta(4),
                reserved: Quanta(2),
                pods: [("pod-0".parse().unwrap(), Quanta(10))].into(),
                held_for: None,
            }],
            managed: ManagedView::default(),
            booked: 1,
            waiting: 1,
        },
        waits: vec![Wait {
            pod: "pod-1".parse().unwrap(),
            resource: Resource::DeviceMemory,
            quanta: Quanta(8),
            since: jiff::Timestamp::from_second(1_000).unwrap(),
            holder: Some(Holder {
                container: "main".into(),
                pod: Some(PodName {
                    namespace: "team-a".into(),
                    name: "late".into(),
                }),
            }),
        }],
        counts: [Resource::DeviceMemory, Resource::ManagedMemory]
            .map(|resource| (resource, Counts::default())),
        generations: BTreeMap::from([(uuid(), 3)]),
        troubles: Troubles::default(),
        too_many: None,
        containers: [].into(),
    }
}

fn inventory(health: Health) -> Inventory {
    let gpu = Gpu {
        uuid: uuid(),
        minor: 5,
        model: "Simulated".into(),
        memory: Bytes::gib(16),
        pci: None,
        mig_parent: None,
        capabilities: Vec::new(),
    };
    Inventory::Gpus {
        driver: Some("580.1".into()),
        gpus: vec![GpuState {
            gpu,
            health,
            memory: Default::default(),
        }],
    }
}

fn around() -> Around {
    Around {
        config: ResourcesConfig {
            quantum: Quantum::Gib1,
            managed_capacity: Bytes(0),
            reserved: Bytes(0),
        },
        boot: "boot-1".into(),
        registration: Registration::Registered,
        runtime: None,
        audited: Audited {
            begun: true,
            ..Audited::default()
        },
        limits: [(("/cg/pod".into(), uuid()), Limit::Set(Bytes::gib(1)))].into(),
        ordered: Ordered {
            generation: Some(1),
            ..Ordered::default()
        },
        faults: Vec::new(),
        kept: KeptStatus {
            enabled: true,
            heard: true,
            cleared: [uuid()].into(),
            ..KeptStatus::default()
        },
    }
}

fn condition(report: &NodeReport, type_: &str) -> (Option<bool>, &'static str) {
    let said = report
        .conditions
        .iter()
        .find(|said| said.type_ == type_)
        .unwrap();
    (said.holds, said.reason)
}

#[test]
fn a_gpu_that_is_held_says_for_whom_and_who_has_its_memory() {
    let mut held = snapshot();
    let waiter: crate::units::PodUid = "pod-1".parse().unwrap();
    held.view.gpus[0].held_for = Some(waiter.clone());
    let gpu = &report(&held, &around()).gpus[0];
    assert_eq!((gpu.state, &gpu.held_for), (State::Reserved, &Some(waiter)));
    assert_eq!(gpu.pods, [("pod-0".parse().unwrap(), Quanta(10))].into());
}

#[test]
fn only_who_waits_for_a_gpu_is_told_to_wait_for_one() {
    let mut managed = snapshot();
    managed.waits[0].resource = Resource::ManagedMemory;
    assert_eq!(report(&managed, &around()).waiting, []);
}

#[test]
fn a_node_at_work_shows_its_gpus_its_room_and_who_waits() {
    let report = report(&snapshot(), &around());
    assert!(
        report
            .conditions
            .iter()
            .all(|said| said.holds == Some(true))
    );
    assert_eq!(report.boot_id, "boot-1");
    assert_eq!(report.driver_version.as_deref(), Some("580.1"));
    assert_eq!(report.device_memory.allocatable, Quanta(16));
    assert_eq!(report.device_memory.free, Quanta(6), "kept room is free");
    assert_eq!(report.device_memory.largest_free, Quanta(4));
    let gpu = &report.gpus[0];
    assert_eq!(
        (gpu.index, gpu.generation, gpu.state),
        (5, 3, State::Active)
    );
    assert_eq!((gpu.free, gpu.largest_free), (Quanta(6), Quanta(4)));
    let waiting = &report.waiting[0];
    assert_eq!(waiting.namespace, "team-a");
    assert_eq!(waiting.pod, "late");
    assert_eq!(waiting.container, "main");
    assert_eq!(waiting.quanta, Quanta(8));
}

#[test]
fn each_kind_of_missing_gpu_has_its_reason() {
    for (inventory, holds, reason) in [
        (Inventory::Starting, None, names::PENDING),
        (
            Inventory::NoDriver(NoDriver::Missing("no libcuda".into())),
            Some(false),
            names::DRIVER_MISSING,
        ),
        (
            Inventory::NoDriver(NoDriver::Failed("nvmlInit".into())),
            Some(false),
            names::DRIVER_FAILED,
        ),
        (Inventory::NoGpu, Some(false), names::NO_GPUS),
        (
            inventory(Health::Unhealthy(Sickness::Lost)),
            Some(false),
            names::NO_HEALTHY_GPU,
        ),
    ] {
        let snapshot = Snapshot {
            inventory,
            ..snapshot()
        };
        let report = report(&snapshot, &around());
        assert_eq!(condition(&report, names::GPUS_FOUND), (holds, reason));
    }
}

#[test]
fn a_sick_gpu_offers_nothing_and_says_why() {
    for (sickness, state, reason) in [
        (Sickness::Lost, State::Lost, "GpuLost"),
        (Sickness::Xid(79), State::Active, "Xid79"),
        (Sickness::WorkerStuck, State::Active, "WorkerStuck"),
        (Sickness::Draining, State::Draining, "Draining"),
        (Sickness::Drained, State::Draining, "Drained"),
    ] {
        let snapshot = Snapshot {
            inventory: inventory(Health::Unhealthy(sickness)),
            ..snapshot()
        };
        let gpu = &report(&snapshot, &around()).gpus[0];
        assert_eq!((gpu.state, gpu.capacity), (state, Quanta::ZERO));
        assert_eq!(
            gpu.health,
            GpuHealth::Unhealthy {
                reason: reason.into()
            }
        );
    }
}

#[test]
fn a_gpu_whose_memory_is_lost_has_a_fault_of_one_name_until_it_is_back() {
    let sick = |away, awaits_reset, sickness| {
        let mut snapshot = snapshot();
        snapshot.inventory = inventory(Health::Unhealthy(sickness));
        if let Inventory::Gpus { gpus, .. } = &mut snapshot.inventory {
            gpus[0].memory = GpuMemory {
                away,
                awaits_reset,
                drained: false,
            };
        }
        report(&snapshot, &around())
    };
    for (away, awaits_reset, sickness, action, state) in [
        (
            false,
            Some(48),
            Sickness::Xid(48),
            FaultAction::ResetGpu,
            State::Draining,
        ),
        (
            false,
            Some(79),
            Sickness::Xid(79),
            FaultAction::RestartNode,
            State::Draining,
        ),
        (
            true,
            Some(79),
            Sickness::Lost,
            FaultAction::RestartNode,
            State::Lost,
        ),
        (
            true,
            None,
            Sickness::NoAnswer,
            FaultAction::Wait,
            State::Lost,
        ),
    ] {
        let said = sick(away, awaits_reset, sickness);
        let [fault] = said.faults.as_slice() else {
            panic!("{:?}", said.faults);
        };
        assert_eq!((fault.id.as_str(), fault.action), ("GPU-a-3", Some(action)));
        assert_eq!(fault.xid.map(u64::from), awaits_reset);
        assert_eq!((&fault.image, said.gpus[0].state), (&None, state));
    }
    let back = sick(false, None, Sickness::Xid(79));
    assert_eq!(
        back.faults,
        [],
        "quiet for a while still, and all is lost already"
    );
    assert_eq!(sick(false, None, Sickness::Xid(74)).faults, []);
    assert_eq!(report(&snapshot(), &around()).faults, []);
}

#[test]
fn each_way_not_to_be_registered_has_its_reason() {
    for (why, holds, reason) in [
        (NotRegistered::Starting, None, names::PENDING),
        (NotRegistered::Stopped, None, names::PENDING),
        (
            NotRegistered::Directory("unreadable".into()),
            Some(false),
            names::KUBELET_FOLDER,
        ),
        (
            NotRegistered::CannotServe("full".into()),
            Some(false),
            names::KUBELET_FOLDER,
        ),
        (
            NotRegistered::NoKubelet(PathBuf::from("/d")),
            Some(false),
            names::KUBELET_UNREACHABLE,
        ),
        (
            NotRegistered::NoStream,
            Some(false),
            names::KUBELET_UNREACHABLE,
        ),
        (
            NotRegistered::Refused("version".into()),
            Some(false),
            names::REGISTRATION_REFUSED,
        ),
    ] {
        let around = Around {
            registration: Registration::NotRegistered(why),
            ..around()
        };
        let report = report(&snapshot(), &around);
        assert_eq!(condition(&report, names::REGISTERED), (holds, reason));
    }
}

#[test]
fn troubles_are_said_under_the_condition_that_they_are_about() {
    let troubled = |troubles| {
        let snapshot = Snapshot {
            troubles,
            ..snapshot()
        };
        report(&snapshot, &around())
    };
    let none = Troubles::default();
    for (troubles, type_, said) in [
        (
            Troubles {
                host: Some((Concern::Driver, "no nvidiactl".into())),
                ..none.clone()
            },
            names::GPUS_FOUND,
            (Some(false), names::DRIVER_FAILED),
        ),
        (
            Troubles {
                host: Some((Concern::Cdi, "full".into())),
                ..none.clone()
            },
            names::CDI_READY,
            (Some(false), names::CDI_FOLDER),
        ),
        (
            Troubles {
                cdi: Some("read-only".into()),
                ..none.clone()
            },
            names::CDI_READY,
            (Some(false), names::CDI_FOLDER),
        ),
        (
            Troubles {
                checkpoint: Some("full".into()),
                ..none.clone()
            },
            names::CHECKPOINT_INTACT,
            (Some(false), names::CHECKPOINT_UNWRITABLE),
        ),
        (
            Troubles {
                rebuilt: Some("malformed".into()),
                ..none.clone()
            },
            names::CHECKPOINT_INTACT,
            (Some(true), names::CHECKPOINT_REBUILT),
        ),
    ] {
        let report = troubled(troubles);
        assert_eq!(condition(&report, type_), said);
        let amiss = report
            .conditions
            .iter()
            .filter(|said| said.holds != Some(true));
        assert!(amiss.count() <= 1, "one trouble is said once");
    }
}

#[test]
fn a_runtime_without_cdi_and_too_many_tokens_are_said() {
    let around = Around {
        runtime: Some("containerd 1.7".into()),
        ..around()
    };
    let refused =
        Devices::new(Resource::DeviceMemory, vec![TokenHealth::Healthy; 5_000]).unwrap_err();
    let snapshot = Snapshot {
        too_many: Some(refused),
        ..snapshot()
    };
    let report = report(&snapshot, &around);
    assert_eq!(
        condition(&report, names::CDI_READY),
        (Some(false), names::CDI_UNSUPPORTED)
    );
    assert_eq!(
        condition(&report, names::WITHIN_TOKEN_LIMIT),
        (Some(false), names::TOO_MANY_TOKENS)
    );
    assert_eq!(report.device_memory.allocatable, Quanta::ZERO);
}

#[test]
fn an_event_is_told_when_something_changes_and_not_again() {
    let well = report(&snapshot(), &around());
    assert_eq!(events(None, &well), []);
    let sick = Snapshot {
        inventory: inventory(Health::Unhealthy(Sickness::Xid(79))),
        ..snapshot()
    };
    let sick = report(&sick, &around());
    let told: Vec<_> = events(Some(&well), &sick)
        .into_iter()
        .map(|(reason, _)| reason)
        .collect();
    assert_eq!(told, [Reason::GpusMissing, Reason::GpuUnhealthy]);
    assert_eq!(events(Some(&sick), &sick), []);
    let told = events(Some(&sick), &well);
    assert_eq!(
        told,
        [(Reason::GpuHealthy, "GPU-a gets new pods again".to_owned())]
    );
}

#[test]
fn limits_of_the_drivers_own_are_told_and_keep_no_node_from_being_ready() {
    let said = |limits: &[Limit]| {
        let places = (0..).map(|pod| (PathBuf::from(format!("/cg/pod{pod}")), uuid()));
        let around = Around {
            limits: places.zip(limits.iter().cloned()).collect(),
            ..around()
        };
        let report = report(&snapshot(), &around);
        assert!(!report.conditions.iter().any(Statement::is_amiss));
        condition(&report, names::DRIVER_LIMITS)
    };
    let set = Limit::Set(Bytes::gib(1));
    let refused = Limit::Refused {
        bytes: Bytes::gib(1),
        why: "not found".into(),
    };
    assert_eq!(said(&[]), (None, names::PENDING));
    assert_eq!(said(std::slice::from_ref(&set)), (Some(true), names::OK));
    assert_eq!(
        said(&[set.clone(), Limit::NotOffered]),
        (Some(false), names::NOT_OFFERED)
    );
    assert_eq!(
        said(&[Limit::NotOffered, refused, set]),
        (Some(false), names::LIMIT_REFUSED)
    );
}

#[test]
fn a_kubelet_that_restarts_is_no_event() {
    let well = report(&snapshot(), &around());
    let gone = Around {
        registration: Registration::NotRegistered(NotRegistered::NoStream),
        ..around()
    };
    assert_eq!(events(Some(&well), &report(&snapshot(), &gone)), []);
}

#[test]
fn a_gpu_that_is_not_audited_and_a_container_that_is_not_enforced_are_named() {
    let mut around = around();
    let stated = |around: &Around| condition(&report(&snapshot(), around), names::AUDITED);
    assert_eq!(stated(&around), (Some(true), names::OK));
    around.audited.stale.insert(uuid());
    assert_eq!(stated(&around), (Some(false), names::AUDIT_STALE));
    around.audited.stale.clear();
    around.audited.hanging.insert("pod-1".parse().unwrap());
    assert_eq!(stated(&around), (Some(false), names::AUDIT_STALE));
    around.audited.begun = false;
    assert_eq!(stated(&around), (None, names::PENDING));
    let container = BoundContainer {
        pod: "pod-1".parse().unwrap(),
        holder: snapshot().waits[0].holder.clone(),
        ..BoundContainer::numbered(1, 1)
    };
    let lack = Lack {
        reason: crate::enforcement::attestation::Reason::MountedOver,
        detail: "/opt/bursar/lib".into(),
    };
    around.audited.not_enforced.push((container, lack));
    let report = report(&snapshot(), &around);
    let said = &report.not_enforced[0];
    assert_eq!(
        (said.pod.as_str(), said.container.as_str()),
        ("late", "main")
    );
    assert_eq!(said.reason, "MountedOver");
    assert!(said.message.contains("/opt/bursar/lib"), "{}", said.message);
}

#[test]
fn why_no_memory_is_kept_is_told_and_keeps_no_node_from_being_ready() {
    let said = |kept: KeptStatus| {
        let mut around = around();
        around.kept = kept;
        let report = report(&snapshot(), &around);
        assert!(report.conditions.iter().all(|said| !said.is_amiss()));
        let of = |type_| condition(&report, type_);
        let scrubbed = of(names::MEMORY_SCRUBBED);
        assert_eq!(
            scrubbed.1 == names::NOT_SCRUBBED,
            !around.kept.refused.is_empty()
        );
        of(names::KEPT_MEMORY)
    };
    let well = around().kept;
    assert_eq!(said(well.clone()), (Some(true), names::OK));
    assert_eq!(
        said(KeptStatus::default()),
        (Some(false), names::SWITCHED_OFF)
    );
    let away = KeptStatus {
        heard: false,
        ..well.clone()
    };
    assert_eq!(said(away), (Some(false), names::VAULT_AWAY));
    let dirty = KeptStatus {
        refused: BTreeMap::from([(uuid(), "why".to_owned())]),
        ..well.clone()
    };
    assert_eq!(said(dirty.clone()), (Some(false), names::NOT_SCRUBBED));
    let stuck = KeptStatus {
        stuck: [uuid()].into(),
        ..dirty
    };
    assert_eq!(said(stuck), (Some(false), names::WORKER_STUCK));
}

#[test]
fn unknown_orders_are_a_condition_and_the_node_stays_ready() {
    let mut around = around();
    let said = |around: &Around| {
        let report = report(&snapshot(), around);
        assert!(report.conditions.iter().all(|said| !said.is_amiss()));
        condition(&report, names::ACCEPTED)
    };
    assert_eq!(said(&around), (Some(true), names::OK));
    around.ordered.not_understood = vec!["contextPolicies[0]".to_owned()];
    assert_eq!(said(&around), (Some(false), names::NOT_UNDERSTOOD));
    around.ordered = Ordered::default();
    assert_eq!(said(&around), (None, names::PENDING));
}
