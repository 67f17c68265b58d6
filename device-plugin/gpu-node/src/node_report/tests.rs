use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use bursar_apiserver::Reason;
use bursar_compute::effect::Verdict;
use bursar_compute::task;
use bursar_crds::conditions::{ConditionUpdate, gpu_node as names};
use bursar_crds::gpu_node::{
    GpuPod, GpuRuntime, GpuState as State, HealthStatus, MAX_GPUS, MAX_NOT_ENFORCED,
    MAX_POD_ENTRIES, MAX_POD_NAMES, MAX_SET_ASIDE, MemoryResource, RuntimeState,
};
use bursar_enforcement::attestation::{EnforcementGap, GapReason};
use bursar_enforcement::driver_limits::{LimitState, LimitUse};
use bursar_gpu::health::{Health, PersistedHealth as GpuMemory, UnhealthyReason};
use bursar_gpu::uvm::UvmModule;
use bursar_gpu::{Gpu, NoDriver};
use bursar_host::checkpoint::write_behind::LateWrite;
use bursar_host::driver_files::DriverVersions;
use bursar_kubelet::devices::{DeviceHealth, Devices};
use bursar_kubelet::lifecycle::NotRegistered;
use bursar_ledger::units::{Bytes, GpuUuid, Quantum, Resource};
use bursar_ledger::{Health as LedgerHealth, ManagedView};
use bursar_node::allocator::{BoundContainer, KubeletCheckpointProblem, NodeProblems, QueuedClaim};
use bursar_node::checkpoint_state::{ContainerName, PodName};
use bursar_node::host::Subsystem;
use bursar_node::metrics::Counts;
use bursar_supervision::runtimes::{FailureClass, RuntimeReport};

use super::*;
use crate::carry_over::carry_over;
use crate::fixtures::at;

fn uuid() -> GpuUuid {
    "GPU-a".parse().unwrap()
}

fn uvm_module(oversubscription: Option<bool>) -> UvmModule {
    UvmModule {
        oversubscription,
        kernel: Some((6, 8)),
        ..UvmModule::default()
    }
}

fn versions(files: &str, module: &str) -> DriverVersions {
    let known = |version: &str| (!version.is_empty()).then(|| version.to_owned());
    DriverVersions {
        files: known(files),
        module: known(module),
    }
}

/// A healthy GPU of 16 GiB with 10 GiB bound and 2 GiB reserved.
fn snapshot() -> Snapshot {
    Snapshot {
        inventory: inventory_with(Health::Healthy),
        view: LedgerView {
            gpus: vec![GpuView {
                health: LedgerHealth::Healthy,
                capacity: Quanta(16),
                bound: Quanta(10),
                unreclaimed: Bytes::gib(1),
                free: Quanta(4),
                reserved: Quanta(2),
                set_aside: [("pod-1".parse().unwrap(), Quanta(2))].into(),
                pods: [("pod-0".parse().unwrap(), Quanta(10))].into(),
                ..GpuView::empty(uuid())
            }],
            managed: ManagedView::default(),
            unbound_allocations: 1,
            queued_claims: 1,
        },
        queued_claims: vec![QueuedClaim {
            queued_at: Default::default(),
            pod: "pod-1".parse().unwrap(),
            resource: Resource::DeviceMemory,
            quanta: Quanta(8),
            priority: Default::default(),
            fits_when_empty: true,
            since: jiff::Timestamp::from_second(1_000).unwrap(),
            name: Some(ContainerName {
                container: "main".into(),
                pod: Some(PodName {
                    namespace: "team-a".into(),
                    name: "late".into(),
                }),
            }),
        }],
        counts: [Resource::DeviceMemory, Resource::ManagedMemory]
            .map(|resource| (resource, Counts::default())),
        uvm: uvm_module(Some(true)),
        driver: versions("580.1", "580.1"),
        generations: BTreeMap::from([(uuid(), 3)]),
        problems: NodeProblems::default(),
        devices_error: None,
        containers: [].into(),
    }
}

fn inventory_with(health: Health) -> Inventory {
    let gpu = Gpu {
        minor: 5,
        ..Gpu::with_uuid("GPU-a")
    };
    Inventory::Gpus {
        driver: Some("580.1".into()),
        gpus: vec![GpuState {
            gpu,
            health,
            persisted: Default::default(),
        }],
    }
}

fn inputs() -> ReportInputs {
    ReportInputs {
        config: ResourcesConfig {
            quantum: Quantum::Gib1,
            managed_capacity: Bytes::gib(8),
            reserved: Bytes(0),
            compute_round: None,
        },
        unknown_keys: Vec::new(),
        boot_id: "boot-1".into(),
        registration: Registration::Registered,
        runtime_problem: None,
        audited: AuditStatus {
            has_run: true,
            ..AuditStatus::default()
        },
        computed: Default::default(),
        limits: [(
            ("/cg/pod".into(), uuid()),
            LimitState::Set(Bytes::gib(1), LimitUse::Counted),
        )]
        .into(),
        overrides: AppliedSpec {
            generation: Some(1),
            ..AppliedSpec::default()
        },
        faults: Vec::new(),
        retained: RetainedStatus {
            enabled: true,
            is_store_connected: true,
            scrubbed: [uuid()].into(),
            ..RetainedStatus::default()
        },
        owners: GpuOwners::BursarAlone,
        token_key: NodePublicKey([7; 32]),
    }
}

/// Whether a condition reports no problem: host memory on GPUs is a problem where it holds.
fn has_no_problem(update: &ConditionUpdate) -> bool {
    match update.type_ {
        names::PAGEABLE_MEMORY_ON_GPU | names::DRIVER_CHANGED => update.holds != Some(true),
        _ => update.holds == Some(true),
    }
}

fn condition(report: &NodeReport, type_: &str) -> (Option<bool>, &'static str) {
    let update = report
        .conditions
        .iter()
        .find(|update| update.type_ == type_)
        .unwrap();
    (update.holds, update.reason)
}

#[test]
fn reserved_gpu_names_its_reservation_and_pods() {
    let mut reserved = snapshot();
    let pending_pod: bursar_ledger::units::PodUid = "pod-1".parse().unwrap();
    reserved.view.gpus[0].reserved_for = Some(pending_pod.clone());
    let gpu = &node_report(&reserved, &inputs()).status.gpus[0];
    assert_eq!(
        (gpu.state, gpu.reserved_for.as_deref()),
        (State::Reserved, Some(pending_pod.as_str()))
    );
    assert_eq!(pods(&gpu.pods), ["pod-0 / 10"]);
}

/// The UID, name and quanta of each pod.
fn pods(pods: &[GpuPod]) -> Vec<String> {
    pods.iter()
        .map(|pod| format!("{} {}/{} {}", pod.uid, pod.namespace, pod.name, pod.quanta))
        .collect()
}

#[test]
fn waits_for_managed_memory_come_after_those_for_device_memory() {
    let mut both = snapshot();
    let device = both.queued_claims[0].clone();
    let managed = QueuedClaim {
        resource: Resource::ManagedMemory,
        quanta: Quanta(3),
        ..device.clone()
    };
    both.queued_claims = vec![managed, device];
    let waiting = node_report(&both, &inputs()).status.waiting;
    let waits = waiting.iter().map(|wait| (wait.resource, wait.quanta));
    assert_eq!(
        waits.collect::<Vec<_>>(),
        [
            (MemoryResource::DeviceMemory, 8),
            (MemoryResource::ManagedMemory, 3)
        ]
    );
}

#[test]
fn working_node_reports_gpus_room_and_waiting_pods() {
    let report = node_report(&snapshot(), &inputs());
    assert!(report.conditions.iter().all(has_no_problem));
    let status = report.status;
    assert_eq!(status.boot_id.as_deref(), Some("boot-1"));
    assert_eq!(status.driver_version.as_deref(), Some("580.1"));
    let expected = NodeMemory {
        allocatable: 16,
        free: 6,
        largest_free: 4,
    };
    assert_eq!(status.device_memory, expected, "kept room is free");
    assert_eq!(
        serde_json::to_value(&status.token_key).unwrap(),
        serde_json::json!({ "algorithm": "Ed25519", "publicKey": "07".repeat(32) })
    );
    let gpu = &status.gpus[0];
    assert_eq!(
        (gpu.index, gpu.generation, gpu.state),
        (5, 3, State::Active)
    );
    assert_eq!((gpu.capacity, gpu.free, gpu.largest_free), (16, 6, 4));
    assert_eq!(pods(&gpu.set_aside), ["pod-1 team-a/late 2"]);
    let waiting = &status.waiting[0];
    assert_eq!(waiting.namespace, "team-a");
    assert_eq!(waiting.pod, "late");
    assert_eq!(waiting.container, "main");
    assert_eq!(waiting.quanta, 8);
}

#[test]
fn division_of_compute_time_is_reported_by_gpu() {
    let compute = |verdict, problem: Option<&str>| {
        let computed = task::GpuCompute {
            verdict,
            problem: problem.map(str::to_owned),
            hidden_groups: 2,
        };
        let mut inputs = ReportInputs {
            computed: [(uuid(), computed)].into(),
            ..inputs()
        };
        inputs.config.compute_round = Some(Duration::from_millis(4));
        let status = node_report(&snapshot(), &inputs).status;
        serde_json::to_value(&status.gpus[0].compute).unwrap()
    };
    let enforced = serde_json::json!({ "state": "Enforced", "round": "4ms", "hiddenGroups": 2 });
    assert_eq!(compute(Verdict::Enforced, None), enforced);
    let failing = compute(Verdict::Enforced, Some("no answer"));
    assert_eq!(
        (&failing["state"], &failing["reason"]),
        (&"NotEnforced".into(), &"no answer".into())
    );
    let inert = compute(Verdict::NotEnforced("x".repeat(400)), None);
    assert_eq!(inert["state"], "NotEnforced");
    assert_eq!(inert["reason"].as_str().map(str::len), Some(256));
    assert_eq!(
        compute(Verdict::Unknown("busy".into()), None)["state"],
        "NotTested"
    );
}

/// A node whose GPUs have these pods, and memory set aside for other ones.
fn full_node(gpus: &[u32], set_aside: u32) -> Snapshot {
    let mut snapshot = snapshot();
    let pod = |number: u32| (format!("{number:036}").parse().unwrap(), Quanta(1));
    let all = (0..).zip(gpus).map(|(gpu, pods)| {
        let gpu = Gpu::with_uuid(&format!("GPU-{gpu}"));
        let view = GpuView {
            set_aside: (0..set_aside).map(pod).collect(),
            pods: (0..*pods).map(pod).collect(),
            ..GpuView::empty(gpu.uuid.clone())
        };
        let state = GpuState {
            gpu,
            health: Health::Healthy,
            persisted: Default::default(),
        };
        (state, view)
    });
    let (gpus, views) = all.unzip();
    snapshot.view.gpus = views;
    snapshot.inventory = Inventory::Gpus { driver: None, gpus };
    snapshot
}

#[test]
fn all_pods_of_a_full_node_are_listed_with_their_gpu() {
    let status = node_report(&full_node(&[250, 300], 0), &inputs()).status;
    let gpus = status.gpus.iter();
    let counts: Vec<_> = gpus.map(|gpu| (gpu.pods.len(), gpu.pods_omitted)).collect();
    assert_eq!(counts, [(250, 0), (256, 44)]);
}

#[test]
fn pods_with_most_memory_come_first_and_have_names_where_known() {
    let mut snapshot = snapshot();
    let uid = |text: &str| text.parse::<PodUid>().unwrap();
    snapshot.view.gpus[0].pods = [(uid("pod-0"), Quanta(4)), (uid("pod-1"), Quanta(8))].into();
    let gpu = &node_report(&snapshot, &inputs()).status.gpus[0];
    assert_eq!(pods(&gpu.pods), ["pod-1 team-a/late 8", "pod-0 / 4"]);
}

#[test]
fn object_stays_small_when_its_lists_are_full() {
    let mut full = full_node(&[250; 300], 9);
    let longest = |number: u32| BoundContainer {
        pod: format!("{number:036}").parse().unwrap(),
        name: Some(ContainerName {
            container: "c".repeat(63),
            pod: Some(PodName {
                namespace: "n".repeat(63),
                name: "p".repeat(253),
            }),
        }),
        ..BoundContainer::with_ids(number.into(), 1)
    };
    let gap = EnforcementGap {
        reason: GapReason::MountedOver,
        detail: "ü".repeat(256),
    };
    let mut inputs = inputs();
    inputs.audited.not_enforced = vec![(longest(0), gap); 300];
    full.containers = (0..250).map(longest).collect();
    let report = node_report(&full, &inputs);
    let status = carry_over(&GpuNodeStatus::default(), &report, Some(1), &at(1));
    assert_eq!(status.gpus.len(), MAX_GPUS);
    let gpus = || status.gpus.iter();
    let pods = || gpus().flat_map(|gpu| gpu.set_aside.iter().chain(&gpu.pods));
    assert_eq!(pods().count(), MAX_GPUS * MAX_SET_ASIDE + MAX_POD_ENTRIES);
    let omitted: Vec<i32> = gpus().map(|gpu| gpu.pods_omitted).collect();
    assert_eq!((omitted[0], omitted[MAX_GPUS - 1]), (0, 250));
    let named = pods().filter(|pod| !pod.name.is_empty());
    assert_eq!(named.count(), MAX_POD_NAMES);
    let gaps = (status.not_enforced.len(), status.not_enforced_count);
    assert_eq!(gaps, (MAX_NOT_ENFORCED, 300));
    let length = serde_json::to_vec(&status).unwrap().len();
    // The API server stores objects of up to 1.5 MiB.
    assert!(length < 768 << 10, "{length}");
}

#[test]
fn missing_gpus_have_a_reason_each() {
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
            inventory_with(Health::Unhealthy(UnhealthyReason::Lost)),
            Some(false),
            names::NO_HEALTHY_GPU,
        ),
    ] {
        let snapshot = Snapshot {
            inventory,
            ..snapshot()
        };
        let report = node_report(&snapshot, &inputs());
        assert_eq!(condition(&report, names::GPUS_FOUND), (holds, reason));
    }
}

#[test]
fn unhealthy_gpu_has_no_capacity_and_a_reason() {
    for (cause, state, reason) in [
        (UnhealthyReason::Lost, State::Lost, "GpuLost"),
        (UnhealthyReason::Xid(79), State::Active, "Xid79"),
        (
            UnhealthyReason::ProvisionerHung,
            State::Active,
            "ProvisionerHung",
        ),
        (UnhealthyReason::CudaRefused, State::Active, "CudaRefused"),
        (UnhealthyReason::OtherOwner, State::Active, "OtherOwner"),
        (UnhealthyReason::Draining, State::Draining, "Draining"),
        (UnhealthyReason::Drained, State::Draining, "Drained"),
    ] {
        let snapshot = Snapshot {
            inventory: inventory_with(Health::Unhealthy(cause)),
            ..snapshot()
        };
        let gpu = &node_report(&snapshot, &inputs()).status.gpus[0];
        assert_eq!((gpu.state, gpu.capacity), (state, 0));
        let health = (gpu.health.status, gpu.health.reason.as_str());
        assert_eq!(health, (HealthStatus::Unhealthy, reason));
    }
}

#[test]
fn each_gpu_has_a_runtime_unless_retained_memory_is_off() {
    let mut inputs = inputs();
    let runtime = |inputs: &ReportInputs| {
        let status = node_report(&snapshot(), inputs).status;
        status.gpus[0].runtime.clone()
    };
    let expected = |state, starts, failures, reason: &str, lent: &str| {
        Some(GpuRuntime {
            state,
            starts,
            lent: lent.into(),
            failures,
            reason: reason.to_owned(),
        })
    };
    let unstarted = expected(RuntimeState::Stopped, 0, 0, "", "0");
    assert_eq!(runtime(&inputs), unstarted, "not started yet");
    let ready = RuntimeReport {
        state: RuntimeState::Ready,
        starts: 2,
        failures: [(FailureClass::Refused, 2), (FailureClass::Exit, 1)].into(),
        reason: "ü".repeat(200),
    };
    inputs.retained.runtimes = [(uuid(), ready)].into();
    inputs.retained.live = [(uuid(), (3, Bytes::gib(7)))].into();
    let ready = expected(RuntimeState::Ready, 2, 3, &"ü".repeat(128), "7Gi");
    assert_eq!(runtime(&inputs), ready);
    inputs.retained.enabled = false;
    assert_eq!(runtime(&inputs), None);
}

#[test]
fn lost_gpu_has_one_fault_id_until_it_is_back() {
    let unhealthy = |away, awaits_reset, reason| {
        let mut snapshot = snapshot();
        snapshot.inventory = inventory_with(Health::Unhealthy(reason));
        if let Inventory::Gpus { gpus, .. } = &mut snapshot.inventory {
            gpus[0].persisted = GpuMemory {
                away,
                awaits_reset,
                draining: false,
                drained: false,
            };
        }
        node_report(&snapshot, &inputs())
    };
    for (away, awaits_reset, reason, action, state) in [
        (
            false,
            Some(48),
            UnhealthyReason::Xid(48),
            FaultAction::ResetGpu,
            State::Draining,
        ),
        (
            false,
            Some(79),
            UnhealthyReason::Xid(79),
            FaultAction::RestartNode,
            State::Draining,
        ),
        (
            true,
            Some(79),
            UnhealthyReason::Lost,
            FaultAction::RestartNode,
            State::Lost,
        ),
        (
            true,
            None,
            UnhealthyReason::NoAnswer,
            FaultAction::Wait,
            State::Lost,
        ),
    ] {
        let report = unhealthy(away, awaits_reset, reason);
        let [fault] = report.status.faults.as_slice() else {
            panic!("{:?}", report.status.faults);
        };
        assert_eq!((fault.id.as_str(), fault.action), ("GPU-a-3", Some(action)));
        assert_eq!(fault.xid.map(i64::from), awaits_reset.map(to_i64));
        assert_eq!(
            (&fault.container, report.status.gpus[0].state),
            (&None, state)
        );
    }
    let back = unhealthy(false, None, UnhealthyReason::Xid(79));
    assert_eq!(
        back.status.faults,
        [],
        "quiet for a while still, and all is lost already"
    );
    assert_eq!(
        unhealthy(false, None, UnhealthyReason::Xid(74))
            .status
            .faults,
        []
    );
    assert_eq!(node_report(&snapshot(), &inputs()).status.faults, []);
}

#[test]
fn registration_failures_have_a_reason_each() {
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
        (NotRegistered::RelaySilent, Some(false), names::RELAY_SILENT),
        (
            NotRegistered::Refused("version".into()),
            Some(false),
            names::REGISTRATION_REFUSED,
        ),
    ] {
        let inputs = ReportInputs {
            registration: Registration::NotRegistered(why),
            ..inputs()
        };
        let report = node_report(&snapshot(), &inputs);
        assert_eq!(condition(&report, names::REGISTERED), (holds, reason));
    }
}

#[test]
fn problems_appear_in_the_condition_of_their_subsystem() {
    let report_with = |problems| {
        let snapshot = Snapshot {
            problems,
            ..snapshot()
        };
        node_report(&snapshot, &inputs())
    };
    let none = NodeProblems::default();
    for (problems, type_, expected) in [
        (
            NodeProblems {
                host: Some((Subsystem::Driver, "no nvidiactl".into())),
                ..none.clone()
            },
            names::GPUS_FOUND,
            (Some(false), names::DRIVER_FAILED),
        ),
        (
            NodeProblems {
                host: Some((Subsystem::Cdi, "full".into())),
                ..none.clone()
            },
            names::CDI_READY,
            (Some(false), names::CDI_FOLDER),
        ),
        (
            NodeProblems {
                cdi: Some("read-only".into()),
                ..none.clone()
            },
            names::CDI_READY,
            (Some(false), names::CDI_FOLDER),
        ),
        (
            NodeProblems {
                checkpoint: Some("full".into()),
                ..none.clone()
            },
            names::CHECKPOINT_INTACT,
            (Some(false), names::CHECKPOINT_UNWRITABLE),
        ),
        (
            NodeProblems {
                rebuilt: Some("malformed".into()),
                ..none.clone()
            },
            names::CHECKPOINT_INTACT,
            (Some(true), names::CHECKPOINT_REBUILT),
        ),
        (
            NodeProblems {
                kubelet_checkpoint: Some(KubeletCheckpointProblem {
                    error: "malformed".into(),
                    is_whole: true,
                }),
                ..none.clone()
            },
            names::KUBELET_CHECKPOINT_READABLE,
            (Some(false), names::KUBELET_CHECKPOINT_UNREAD),
        ),
        (
            NodeProblems {
                kubelet_checkpoint: Some(KubeletCheckpointProblem {
                    error: "2 entries".into(),
                    is_whole: false,
                }),
                ..none.clone()
            },
            names::KUBELET_CHECKPOINT_READABLE,
            (Some(false), names::KUBELET_CHECKPOINT_PARTLY_READ),
        ),
    ] {
        let report = report_with(problems);
        assert_eq!(condition(&report, type_), expected);
        if expected.1 == names::KUBELET_CHECKPOINT_PARTLY_READ {
            assert!(!report.conditions.iter().any(ConditionUpdate::is_problem));
        }
        let failing = report
            .conditions
            .iter()
            .filter(|update| !has_no_problem(update));
        assert!(failing.count() <= 1, "one problem is reported once");
    }
}

#[test]
fn runtime_without_cdi_and_token_limit_are_reported() {
    let inputs = ReportInputs {
        runtime_problem: Some("containerd 1.7".into()),
        ..inputs()
    };
    let refused =
        Devices::new(Resource::DeviceMemory, vec![DeviceHealth::Healthy; 5_000]).unwrap_err();
    let snapshot = Snapshot {
        devices_error: Some(refused),
        ..snapshot()
    };
    let report = node_report(&snapshot, &inputs);
    assert_eq!(
        condition(&report, names::CDI_READY),
        (Some(false), names::CDI_UNSUPPORTED)
    );
    assert_eq!(
        condition(&report, names::WITHIN_DEVICE_ID_LIMIT),
        (Some(false), names::TOO_MANY_DEVICE_IDS)
    );
    assert_eq!(report.status.device_memory.allocatable, 0);
}

#[test]
fn memory_of_a_pod_with_leftover_processes_is_reported_as_leaked() {
    let mut snapshot = snapshot();
    let (pod, other) = ("pod-1".parse().unwrap(), "pod-2".parse().unwrap());
    snapshot.view.gpus[0].pods = [(pod, Quanta(3)), (other, Quanta(4))].into();
    let mut leftover = inputs();
    leftover.audited.leftovers = ["pod-1".parse().unwrap()].into();
    snapshot.view.gpus[0].leaked = Bytes::gib(2);
    let leaked = |inputs| node_report(&snapshot, inputs).status.gpus[0].leaked.clone();
    assert_eq!(leaked(&leftover), Some("5Gi".into()));
    assert_eq!(leaked(&inputs()), Some("2Gi".into()));
}

#[test]
fn event_of_leaked_memory_says_why_nothing_is_proven() {
    let well = node_report(&snapshot(), &inputs());
    let mut leaking = snapshot();
    leaking.view.gpus[0].leaked = Bytes::gib(1);
    let leak_message = |inputs: &ReportInputs| {
        let events = transition_events(Some(&well), &node_report(&leaking, inputs));
        let [(Reason::MemoryLeaked, message)] = &events[..] else {
            panic!("{events:?}");
        };
        message.clone()
    };
    assert!(leak_message(&inputs()).ends_with("are held by others, and not given to pods"));
    let mut inputs = inputs();
    inputs.audited.managed_gpus.insert(uuid());
    let message = leak_message(&inputs);
    assert!(message.ends_with("or drain the GPU"), "{message}");
}

#[test]
fn event_is_published_once_per_change() {
    let healthy = node_report(&snapshot(), &inputs());
    assert_eq!(transition_events(None, &healthy), []);
    let unhealthy = Snapshot {
        inventory: inventory_with(Health::Unhealthy(UnhealthyReason::Xid(79))),
        ..snapshot()
    };
    let unhealthy = node_report(&unhealthy, &inputs());
    let reasons: Vec<_> = transition_events(Some(&healthy), &unhealthy)
        .into_iter()
        .map(|(reason, _)| reason)
        .collect();
    assert_eq!(reasons, [Reason::GpusMissing, Reason::GpuUnhealthy]);
    assert_eq!(transition_events(Some(&unhealthy), &unhealthy), []);
    let events = transition_events(Some(&unhealthy), &healthy);
    assert_eq!(
        events,
        [(Reason::GpuHealthy, "GPU-a gets new pods again".to_owned())]
    );
}

#[test]
fn driver_limits_are_reported_and_do_not_affect_readiness() {
    let limits_condition = |limits: &[LimitState]| {
        let keys = (0..).map(|pod| (PathBuf::from(format!("/cg/pod{pod}")), uuid()));
        let inputs = ReportInputs {
            limits: keys.zip(limits.iter().cloned()).collect(),
            ..inputs()
        };
        let report = node_report(&snapshot(), &inputs);
        assert!(!report.conditions.iter().any(ConditionUpdate::is_problem));
        condition(&report, names::DRIVER_LIMITS)
    };
    let with_use = |found| LimitState::Set(Bytes::gib(1), found);
    let (unused, set) = (with_use(LimitUse::Unused), with_use(LimitUse::Counted));
    let refused = LimitState::Failed {
        bytes: Bytes::gib(1),
        why: "not found".into(),
    };
    assert_eq!(limits_condition(&[]), (None, names::PENDING));
    assert_eq!(
        limits_condition(std::slice::from_ref(&set)),
        (Some(true), names::OK)
    );
    assert_eq!(
        limits_condition(std::slice::from_ref(&unused)),
        (None, names::PENDING),
        "it may be set and not enforced"
    );
    assert_eq!(
        limits_condition(&[unused.clone(), set.clone()]),
        (Some(true), names::OK)
    );
    for found in [
        LimitUse::Uncounted(Bytes(1)),
        LimitUse::Exceeded(Bytes::gib(2)),
    ] {
        assert_eq!(
            limits_condition(&[set.clone(), with_use(found)]),
            (Some(false), names::LIMIT_NOT_ENFORCED)
        );
    }
    assert_eq!(
        limits_condition(&[set.clone(), LimitState::Unsupported]),
        (Some(false), names::NOT_OFFERED)
    );
    assert_eq!(
        limits_condition(&[LimitState::Unsupported, refused, set]),
        (Some(false), names::LIMIT_REFUSED)
    );
}

#[test]
fn kubelet_restart_publishes_no_event() {
    let healthy = node_report(&snapshot(), &inputs());
    let disconnected = ReportInputs {
        registration: Registration::NotRegistered(NotRegistered::NoStream),
        ..inputs()
    };
    assert_eq!(
        transition_events(Some(&healthy), &node_report(&snapshot(), &disconnected)),
        []
    );
}

#[test]
fn stale_audit_and_unenforced_container_are_named() {
    let mut inputs = inputs();
    let audited_condition =
        |inputs: &ReportInputs| condition(&node_report(&snapshot(), inputs), names::AUDITED);
    assert_eq!(audited_condition(&inputs), (Some(true), names::OK));
    inputs.audited.stale_gpus.insert(uuid());
    assert_eq!(
        audited_condition(&inputs),
        (Some(false), names::AUDIT_STALE)
    );
    inputs.audited.stale_gpus.clear();
    inputs.audited.hanging_pods.insert("pod-1".parse().unwrap());
    assert_eq!(
        audited_condition(&inputs),
        (Some(false), names::AUDIT_STALE)
    );
    inputs.audited.has_run = false;
    assert_eq!(audited_condition(&inputs), (None, names::PENDING));
    let container = BoundContainer {
        pod: "pod-1".parse().unwrap(),
        name: snapshot().queued_claims[0].name.clone(),
        ..BoundContainer::with_ids(1, 1)
    };
    let mounted_over = EnforcementGap {
        reason: GapReason::MountedOver,
        detail: "/opt/bursar/lib".into(),
    };
    inputs.audited.not_enforced.push((container, mounted_over));
    let report = node_report(&snapshot(), &inputs);
    let gap = &report.status.not_enforced[0];
    assert_eq!((gap.pod.as_str(), gap.container.as_str()), ("late", "main"));
    assert_eq!(gap.reason, "MountedOver");
    assert!(gap.message.contains("/opt/bursar/lib"), "{}", gap.message);
}

#[test]
fn missing_retained_memory_is_reported_with_a_reason() {
    let retained_condition = |retained: RetainedStatus| {
        let mut inputs = inputs();
        inputs.retained = retained;
        let report = node_report(&snapshot(), &inputs);
        assert!(report.conditions.iter().all(|update| !update.is_problem()));
        let condition_of = |type_| condition(&report, type_);
        let scrubbed = condition_of(names::MEMORY_SCRUBBED);
        assert_eq!(
            scrubbed.1 == names::NOT_SCRUBBED,
            !inputs.retained.refused.is_empty()
        );
        condition_of(names::RETAINED_MEMORY)
    };
    let working = inputs().retained;
    assert_eq!(retained_condition(working.clone()), (Some(true), names::OK));
    assert_eq!(
        retained_condition(RetainedStatus::default()),
        (Some(false), names::SWITCHED_OFF)
    );
    let disconnected = RetainedStatus {
        is_store_connected: false,
        ..working.clone()
    };
    assert_eq!(
        retained_condition(disconnected),
        (Some(false), names::FD_STORE_UNAVAILABLE)
    );
    let unscrubbed = RetainedStatus {
        refused: BTreeMap::from([(uuid(), "why".to_owned())]),
        ..working.clone()
    };
    assert_eq!(
        retained_condition(unscrubbed.clone()),
        (Some(false), names::NOT_SCRUBBED)
    );
    for (state, reason) in [
        (RuntimeState::Stuck, names::PROVISIONER_HUNG),
        (RuntimeState::Refused, names::CUDA_REFUSED),
        (RuntimeState::Starting, names::NOT_SCRUBBED),
    ] {
        let runtime = RuntimeReport {
            state,
            ..RuntimeReport::default()
        };
        let failing = RetainedStatus {
            runtimes: [(uuid(), runtime)].into(),
            ..unscrubbed.clone()
        };
        assert_eq!(retained_condition(failing), (Some(false), reason));
    }
    let unreadable = RetainedStatus {
        uncharged: 1,
        ..inputs().retained
    };
    assert_eq!(
        retained_condition(unreadable),
        (Some(false), names::NOT_UNDERSTOOD)
    );
}

#[test]
fn late_state_write_is_a_condition_that_names_the_directory() {
    let late = LateWrite {
        directory: "/var/lib/bursar".into(),
        lag: Duration::from_secs(7),
    };
    let late_generations = Snapshot {
        problems: NodeProblems {
            late_write: Some(late.clone()),
            ..NodeProblems::default()
        },
        ..snapshot()
    };
    let mut late_usage = inputs();
    late_usage.audited.late_write = Some(late);
    let written = node_report(&snapshot(), &inputs());
    assert_eq!(
        condition(&written, names::STATE_WRITTEN),
        (Some(true), names::OK)
    );
    for report in [
        node_report(&late_generations, &inputs()),
        node_report(&snapshot(), &late_usage),
    ] {
        assert!(report.conditions.iter().all(|update| !update.is_problem()));
        let update = report
            .conditions
            .iter()
            .find(|update| update.type_ == names::STATE_WRITTEN);
        let update = update.unwrap();
        assert_eq!(
            (update.holds, update.reason),
            (Some(false), names::WRITE_LATE)
        );
        assert!(
            update.message.contains("/var/lib/bursar"),
            "{}",
            update.message
        );
    }
}

#[test]
fn unknown_spec_entries_are_a_condition_only() {
    let mut inputs = inputs();
    let accepted_condition = |inputs: &ReportInputs| {
        let report = node_report(&snapshot(), inputs);
        assert!(report.conditions.iter().all(|update| !update.is_problem()));
        condition(&report, names::ACCEPTED)
    };
    assert_eq!(accepted_condition(&inputs), (Some(true), names::OK));
    inputs.overrides.unrecognized = vec!["restarts[0]".to_owned()];
    assert_eq!(
        accepted_condition(&inputs),
        (Some(false), names::NOT_UNDERSTOOD)
    );
    inputs.overrides = AppliedSpec::default();
    assert_eq!(accepted_condition(&inputs), (None, names::PENDING));
    inputs.unknown_keys = vec!["audit.later".to_owned()];
    assert_eq!(
        accepted_condition(&inputs),
        (Some(false), names::NOT_UNDERSTOOD)
    );
}

#[test]
fn other_plugin_is_a_condition_and_no_reason_to_be_unready() {
    let other = GpuOwners::OtherPlugin {
        resource: "nvidia.com/gpu".to_owned(),
        devices: 8,
    };
    for (owners, expected) in [
        (GpuOwners::Unknown, (None, names::PENDING)),
        (GpuOwners::BursarAlone, (Some(true), names::OK)),
        (other, (Some(false), names::OTHER_PLUGIN)),
    ] {
        let inputs = ReportInputs { owners, ..inputs() };
        let report = node_report(&snapshot(), &inputs);
        assert_eq!(condition(&report, names::SOLE_OWNER), expected);
        assert!(report.conditions.iter().all(|update| !update.is_problem()));
    }
}

#[test]
fn driver_whose_module_was_not_reloaded_is_a_condition() {
    let not_reloaded = (Some(true), names::MODULE_NOT_RELOADED);
    for (files, module, expected) in [
        ("595.1", "580.1", not_reloaded),
        ("595.1", "595.1", (Some(false), names::OK)),
        ("", "580.1", (None, names::PENDING)),
        ("595.1", "", (None, names::PENDING)),
    ] {
        let driver = versions(files, module);
        let report = node_report(
            &Snapshot {
                driver,
                ..snapshot()
            },
            &inputs(),
        );
        assert_eq!(condition(&report, names::DRIVER_CHANGED), expected);
        assert!(!report.conditions.iter().any(ConditionUpdate::is_problem));
    }
}

#[test]
fn managed_memory_is_offered_only_where_eviction_is_safe() {
    let condition_with = |managed_capacity, uvm| {
        let config = ResourcesConfig {
            managed_capacity,
            ..inputs().config
        };
        let snapshot = Snapshot { uvm, ..snapshot() };
        let report = node_report(&snapshot, &ReportInputs { config, ..inputs() });
        assert!(!report.conditions.iter().any(ConditionUpdate::is_problem));
        condition(&report, names::MANAGED_MEMORY)
    };
    let managed_condition = |managed_capacity, oversubscription| {
        condition_with(managed_capacity, uvm_module(oversubscription))
    };
    let switched_off = (Some(false), names::SWITCHED_OFF);
    assert_eq!(managed_condition(Bytes::ZERO, Some(true)), switched_off);
    assert_eq!(managed_condition(Bytes::ZERO, Some(false)), switched_off);
    assert_eq!(
        managed_condition(Bytes::gib(8), Some(true)),
        (Some(true), names::OK)
    );
    let pinned = managed_condition(Bytes::gib(8), Some(false));
    assert_eq!(pinned, (Some(false), names::EVICTION_UNSAFE));
    assert_eq!(
        managed_condition(Bytes::gib(8), None),
        (None, names::PENDING)
    );
    let without_concurrent_access = UvmModule {
        not_concurrent: [uuid()].into(),
        ..uvm_module(None)
    };
    assert_eq!(
        condition_with(Bytes::gib(8), without_concurrent_access),
        pinned
    );
}

#[test]
fn host_memory_on_gpus_is_a_condition() {
    let pageable_condition = |module: UvmModule, has_ats| {
        let update = conditions::pageable_memory(&module, has_ats);
        (update.holds, update.reason)
    };
    let module = |hmm_disabled, ats| UvmModule {
        hmm_disabled,
        ats,
        ..UvmModule::default()
    };
    assert_eq!(
        pageable_condition(module(None, None), false),
        (None, names::PENDING)
    );
    assert_eq!(
        pageable_condition(module(Some(true), None), false),
        (Some(false), names::OK)
    );
    assert_eq!(
        pageable_condition(module(Some(false), None), false),
        (Some(true), names::HMM_ENABLED)
    );
    assert_eq!(
        pageable_condition(module(Some(false), Some(true)), true),
        (Some(true), names::ATS_ENABLED)
    );
}
