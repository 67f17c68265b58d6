//! Tests programs that bypass the shim. The agent reports each within two seconds, or its memory
//! stays limited all the same.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::assert_within;
use crate::common::kubelet::Pod;
use crate::container::{Container, PLAIN, Start, machine};
use crate::machine::Machine;

const GIB: u64 = 1 << 30;
/// The longest time until a finding is reported.
const FINDING_LIMIT: Duration = Duration::from_secs(2);
/// The longest time until a process is ended under the policy `kill`.
const KILL_LIMIT: Duration = Duration::from_secs(5);
/// The time of several audits.
const SEVERAL_AUDITS: Duration = Duration::from_millis(3_500);

/// Admits a pod of 8 GiB.
async fn admit_pod(machine: &Machine, name: &str) -> Pod {
    machine.admit(name, 8).await
}

/// The value of a metric's series that has each of the space-separated `labels`. None where there
/// is no such series.
pub(crate) async fn metric_value(machine: &Machine, name: &str, labels: &str) -> Option<i64> {
    let (_, text) = machine.get("/metrics").await;
    let line = text.lines().find(|line| {
        let named = line.strip_prefix(name);
        named.is_some_and(|rest| {
            rest.starts_with(['{', ' ']) && labels.split(' ').all(|label| rest.contains(label))
        })
    })?;
    line.rsplit(' ').next()?.parse().ok()
}

/// Waits until `wanted` accepts the metric's value. Returns the time that this took.
pub(crate) async fn wait_for_metric(
    machine: &Machine,
    name: &str,
    labels: &str,
    wanted: impl Fn(i64) -> bool,
) -> Duration {
    let start = Instant::now();
    loop {
        let now = metric_value(machine, name, labels).await;
        if now.is_some_and(&wanted) {
            return start.elapsed();
        }
        let waited = start.elapsed() < Duration::from_secs(60);
        assert!(waited, "{name}{{{labels}}} is {now:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until a metric has this value. Returns the time that this took.
pub(crate) async fn wait_for_value(
    machine: &Machine,
    name: &str,
    labels: &str,
    wanted: i64,
) -> Duration {
    wait_for_metric(machine, name, labels, |now| now == wanted).await
}

pub(crate) async fn count_findings(machine: &Machine, kind: &str) -> i64 {
    let labels = format!("finding=\"{kind}\"");
    metric_value(machine, "bursar_agent_findings_total", &labels)
        .await
        .unwrap_or(0)
}

pub(crate) async fn wait_until_not_enforced(machine: &Machine, reason: &str) -> Duration {
    let labels = format!("reason=\"{reason}\"");
    wait_for_value(machine, "bursar_container_enforced", &labels, 0).await
}

/// Waits until the agent's log contains `what`. The agent sets its metrics before it logs.
pub(crate) async fn wait_for_log(machine: &Machine, text: &str) {
    crate::common::eventually(text, || machine.log().contains(text)).await;
}

#[tokio::test]
async fn honest_container_is_enforced_and_its_usage_is_shown() {
    assert_within(FINDING_LIMIT, async || {
        let machine = machine("").await;
        let pod = admit_pod(&machine, "a").await;
        let mut honest = Container::start(&machine, &pod, PLAIN).await;
        honest.ok("open libcuda.so.1");
        honest.ok(&format!("alloc {}", 5 * GIB));
        let enforced =
            wait_for_value(&machine, "bursar_container_enforced", r#"reason="""#, 1).await;
        assert_eq!(honest.call(&format!("alloc {}", 4 * GIB)), "err 2");
        let of = r#"pod="a",container="main",account="GPU-"#;
        // The context of the program may be charged as well.
        let used = "bursar_container_memory_used_bytes";
        wait_for_metric(&machine, used, of, |used| used >= (5 * GIB) as i64).await;
        let quota = "bursar_container_memory_quota_bytes";
        wait_for_value(&machine, quota, of, (8 * GIB) as i64).await;
        wait_for_value(&machine, "bursar_container_denied_total", "cuMemAlloc", 1).await;
        wait_for_value(&machine, "bursar_gpu_unattributed_bytes", "0001", 0).await;
        tokio::time::sleep(SEVERAL_AUDITS).await;
        for kind in [
            "over-quota",
            "untracked-process",
            "tampered-page",
            "holder",
            "unaccounted",
        ] {
            assert_eq!(count_findings(&machine, kind).await, 0, "{kind}");
        }
        assert_eq!(
            metric_value(&machine, "bursar_gpu_audit_stale", "0001").await,
            Some(0)
        );
        let count = metric_value(&machine, "bursar_agent_audit_seconds_count", "")
            .await
            .unwrap();
        let (_, text) = machine.get("/metrics").await;
        let sum = text
            .lines()
            .find_map(|line| line.strip_prefix("bursar_agent_audit_seconds_sum "));
        println!("{count} audits took {} s", sum.unwrap());
        enforced
    })
    .await;
}

#[tokio::test]
async fn program_on_the_real_driver_is_found_and_not_killed() {
    assert_within(FINDING_LIMIT, async || {
        let machine = machine("").await;
        let pod = admit_pod(&machine, "a").await;
        let mut bypass = Container::start(&machine, &pod, PLAIN).await;
        bypass.ok("open /opt/bursar/drv/cuda.so.1");
        bypass.ok(&format!("alloc {}", 6 * GIB));
        let untracked = wait_for_value(
            &machine,
            "bursar_agent_findings_total",
            "untracked-process",
            1,
        )
        .await;
        let mut honest = Container::start(&machine, &pod, PLAIN).await;
        honest.ok("open libcuda.so.1");
        assert_eq!(
            honest.call(&format!("alloc {}", 3 * GIB)),
            "err 2",
            "the container has it already"
        );
        bypass.ok(&format!("alloc {}", 5 * GIB));
        let over = wait_for_value(&machine, "bursar_agent_findings_total", "over-quota", 1).await;
        tokio::time::sleep(SEVERAL_AUDITS).await;
        assert!(bypass.is_alive(), "the policy is to report");
        assert_eq!(
            count_findings(&machine, "untracked-process").await,
            1,
            "reported once"
        );
        untracked.max(over)
    })
    .await;
}

#[tokio::test]
async fn memory_taken_by_a_private_driver_table_is_found() {
    assert_within(FINDING_LIMIT, async || {
        let machine = machine("").await;
        let pod = admit_pod(&machine, "a").await;
        let mut program = Container::start(&machine, &pod, PLAIN).await;
        program.ok("open libcuda.so.1");
        program.ok(&format!("alloc {GIB}"));
        program.ok(&format!("table {}", 9 * GIB));
        wait_for_value(&machine, "bursar_agent_findings_total", "over-quota", 1).await
    })
    .await;
}

#[tokio::test]
async fn kill_policy_kills_the_finding_alone_after_three_audits() {
    let machine = machine("policy = \"kill\"\nkill-after = 3").await;
    let (pod, other) = (
        admit_pod(&machine, "a").await,
        admit_pod(&machine, "b").await,
    );
    let mut honest = Container::start(&machine, &pod, PLAIN).await;
    honest.ok("open libcuda.so.1");
    honest.ok(&format!("alloc {GIB}"));
    let mut neighbour = Container::start(&machine, &other, PLAIN).await;
    neighbour.ok("open libcuda.so.1");
    neighbour.ok(&format!("alloc {}", 7 * GIB));
    let mut bypass = Container::start(&machine, &pod, PLAIN).await;
    // The first finding may precede the answer to either call.
    let start = Instant::now();
    bypass.ok("open /opt/bursar/drv/cuda.so.1");
    bypass.ok("alloc 4096");
    crate::common::eventually("its end", || !bypass.is_alive()).await;
    let took = start.elapsed();
    println!("ended after {took:?}");
    assert!(took > Duration::from_secs(1), "{took:?}");
    wait_for_value(&machine, "bursar_agent_audit_kills_total", "", 1).await;
    tokio::time::sleep(SEVERAL_AUDITS).await;
    assert!(honest.is_alive() && neighbour.is_alive());
    honest.ok(&format!("alloc {}", 6 * GIB));
}

/// Allocates seven of eight GiB without a context, through the driver's own file.
fn hold_without_context(program: &mut Container) {
    program.ok("raw /opt/bursar/drv/cuda.so.1");
    program.ok(&format!("export {}", 7 * GIB));
}

#[tokio::test]
async fn process_that_holds_memory_without_context_is_found() {
    assert_within(FINDING_LIMIT, async || {
        let machine = machine("").await;
        let pod = admit_pod(&machine, "a").await;
        let mut honest = Container::start(&machine, &pod, PLAIN).await;
        honest.ok("open libcuda.so.1");
        honest.ok(&format!("alloc {}", 7 * GIB));
        // The program reports the memory that the driver lists for it as exported.
        honest.ok(&format!("tell {}", 7 * GIB));
        let mut holder = Container::start(&machine, &pod, PLAIN).await;
        hold_without_context(&mut holder);
        let took = wait_for_value(&machine, "bursar_agent_findings_total", "holder", 1).await;
        wait_for_log(&machine, &format!("pid: {}", holder.pid())).await;
        tokio::time::sleep(SEVERAL_AUDITS).await;
        assert!(holder.is_alive(), "the policy is to report");
        assert_eq!(count_findings(&machine, "holder").await, 1, "reported once");
        took
    })
    .await;
}

/// Beside a process that holds memory without a context, honest programs start, fork a child, or
/// export.
#[tokio::test]
async fn process_that_holds_memory_without_context_is_killed() {
    assert_within(KILL_LIMIT, async || {
        let machine = machine("policy = \"kill\"\nkill-after = 3").await;
        let (pod, other) = (
            admit_pod(&machine, "a").await,
            admit_pod(&machine, "b").await,
        );
        let mut launcher = Container::start(&machine, &other, PLAIN).await;
        launcher.ok("raw libcuda.so.1");
        let mut parent = Container::start(&machine, &other, PLAIN).await;
        parent.ok("open libcuda.so.1");
        parent.ok(&format!("export {GIB}"));
        let child = parent.call("fork");
        let child: u32 = child.strip_prefix("ok ").unwrap().parse().unwrap();
        machine.adopt(&other, child);
        let mut holder = Container::start(&machine, &pod, PLAIN).await;
        hold_without_context(&mut holder);
        let start = Instant::now();
        crate::common::eventually("its end", || !holder.is_alive()).await;
        let took = start.elapsed();
        println!("ended after {took:?}");
        tokio::time::sleep(SEVERAL_AUDITS).await;
        assert!(launcher.is_alive() && parent.is_alive());
        let child = rustix::process::Pid::from_raw(child.cast_signed()).unwrap();
        let alive = rustix::process::test_kill_process(child).is_ok();
        rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
        assert!(alive, "the forked child");
        let counts = [
            count_findings(&machine, "holder").await,
            count_findings(&machine, "untracked-process").await,
        ];
        assert_eq!(counts, [1, 0]);
        let kills = metric_value(&machine, "bursar_agent_audit_kills_total", "").await;
        assert_eq!(kills, Some(1));
        took
    })
    .await;
}

/// The first process hides the container's mounts; its child takes memory past the shim. An honest
/// neighbour has a session on the GPU.
#[tokio::test]
async fn process_is_killed_when_the_first_process_hides_the_mounts() {
    for how in ["chroot", "thread"] {
        let named = std::cell::Cell::new(Duration::ZERO);
        assert_within(KILL_LIMIT, async || {
            let machine = machine("policy = \"kill\"\nkill-after = 3").await;
            let (pod, other) = (
                admit_pod(&machine, "a").await,
                admit_pod(&machine, "b").await,
            );
            let mut neighbour = Container::start(&machine, &other, PLAIN).await;
            neighbour.ok("open libcuda.so.1");
            neighbour.ok(&format!("alloc {GIB}"));
            let mut hidden = Container::as_root(&machine, &pod, "").await;
            let child = hidden.number(&format!("leave {how}"));
            machine.adopt(&pod, u32::try_from(child).unwrap());
            hidden.ok("open /opt/bursar/drv/cuda.so.1");
            let start = Instant::now();
            hidden.ok(&format!("alloc {}", 6 * GIB));
            let kind = "untracked-process";
            named.set(wait_for_value(&machine, "bursar_agent_findings_total", kind, 1).await);
            wait_for_log(&machine, "allocation: Some").await;
            crate::common::eventually("its end", || !hidden.is_alive()).await;
            let took = start.elapsed();
            println!("{how}: named after {:?}, ended after {took:?}", named.get());
            tokio::time::sleep(SEVERAL_AUDITS).await;
            neighbour.ok(&format!("alloc {GIB}"));
            let kills = metric_value(&machine, "bursar_agent_audit_kills_total", "").await;
            assert_eq!(kills, Some(1));
            took
        })
        .await;
        assert!(named.get() < FINDING_LIMIT * 2, "{named:?}");
    }
}

#[tokio::test]
async fn process_in_a_container_without_gpu_memory_is_its_pods() {
    assert_within(KILL_LIMIT, async || {
        let machine = machine("policy = \"kill\"\nkill-after = 3").await;
        let pod = admit_pod(&machine, "a").await;
        let _container = Container::start(&machine, &pod, PLAIN).await;
        let mut actor = machine.lab.spawn_client().unwrap();
        machine.show(
            actor.pid(),
            &format!("0::/kubepods/pod{}/sidecar\n", pod.uid),
        );
        let start = Instant::now();
        // One of the two GPUs is the pod's.
        actor.request("context 0").unwrap();
        actor.request("context 1").unwrap();
        let untracked = r#"account="GPU- part="untracked""#;
        let memory = "bursar_container_memory_charged_bytes";
        wait_for_metric(&machine, memory, untracked, |bytes| bytes > 0).await;
        let kills = "bursar_agent_audit_kills_total";
        wait_for_value(&machine, kills, "", 1).await;
        start.elapsed()
    })
    .await;
}

/// A process takes memory past the shim, and exits before an audit sees it. Its forked child has
/// its files. Honest neighbours have a session, and a forked worker.
#[tokio::test]
async fn child_that_keeps_memory_of_an_ended_process_is_killed() {
    assert_within(Duration::from_secs(15), async || {
        let machine = machine("policy = \"kill\"\nkill-after = 3").await;
        let (pod, other) = (
            admit_pod(&machine, "a").await,
            admit_pod(&machine, "b").await,
        );
        let mut neighbour = Container::start(&machine, &other, PLAIN).await;
        neighbour.ok("open libcuda.so.1");
        neighbour.ok(&format!("alloc {GIB}"));
        let worker = neighbour.number("fork");
        machine.adopt(&other, u32::try_from(worker).unwrap());
        let mut taker = Container::run_taker(&machine, &pod).await;
        taker.ok("open /opt/bursar/drv/cuda.so.1");
        taker.ok(&format!("alloc {}", 6 * GIB));
        let start = Instant::now();
        let child = u32::try_from(taker.number("outlive")).unwrap();
        machine.adopt(&pod, child);
        let named = wait_for_value(&machine, "bursar_agent_findings_total", "holder", 1).await;
        let stat = format!("/proc/{child}/stat");
        let has_ended = || match std::fs::read_to_string(&stat) {
            Ok(stat) => stat.contains(") Z "),
            Err(_) => true,
        };
        crate::common::eventually("its end", has_ended).await;
        println!("named after {named:?}, ended after {:?}", start.elapsed());
        assert!(named < Duration::from_secs(12), "{named:?}");
        let took = start.elapsed();
        tokio::time::sleep(SEVERAL_AUDITS).await;
        neighbour.ok(&format!("alloc {GIB}"));
        assert!(Path::new(&format!("/proc/{worker}")).exists());
        let kills = metric_value(&machine, "bursar_agent_audit_kills_total", "").await;
        assert_eq!(kills, Some(1));
        let worker = rustix::process::Pid::from_raw(worker as i32).unwrap();
        rustix::process::kill_process(worker, rustix::process::Signal::KILL).unwrap();
        took
    })
    .await;
}

/// A pod without GPU memory uses a GPU; one in an exempt namespace does so too.
#[tokio::test]
async fn process_of_a_pod_without_gpu_memory_is_killed_unless_exempt() {
    let exempt = "policy = \"kill\"\nkill-after = 3\nexempt-namespaces = [\"monitoring\"]";
    let machine = machine(exempt).await;
    let uid = |last: u32| format!("8b2e3f0a-1f5c-4c41-9d53-{last:012}");
    let mut actors = Vec::new();
    for (last, namespace) in [(1, "team"), (2, "monitoring")] {
        let mut actor = machine.lab.spawn_client().unwrap();
        let (uid, pod) = (uid(last), format!("{namespace}_pod_{}", uid(last)));
        std::fs::create_dir_all(machine.path(&format!("proc/1/root/var/log/pods/{pod}"))).unwrap();
        machine.show(actor.pid(), &format!("0::/kubepods/pod{uid}/main\n"));
        actor.request("context 0").unwrap();
        actors.push(actor);
    }
    let kills = "bursar_agent_audit_kills_total";
    wait_for_value(&machine, kills, "", 1).await;
    tokio::time::sleep(SEVERAL_AUDITS).await;
    assert_eq!(metric_value(&machine, kills, "").await, Some(1));
    actors[1].request("context 0").unwrap();
}

#[tokio::test]
async fn host_process_on_a_gpu_is_named_and_not_killed() {
    let machine = machine("policy = \"kill\"\nkill-after = 1").await;
    let mut actor = machine.lab.spawn_client().unwrap();
    machine.show(actor.pid(), "0::/system.slice/mine.service\n");
    actor.request("context 0").unwrap();
    wait_for_value(
        &machine,
        "bursar_agent_findings_total",
        "untracked-process",
        1,
    )
    .await;
    wait_for_value(&machine, "bursar_gpu_untracked_processes", "0001", 1).await;
    tokio::time::sleep(SEVERAL_AUDITS).await;
    actor.request("context 0").unwrap();
    assert_eq!(
        metric_value(&machine, "bursar_agent_audit_kills_total", "").await,
        Some(0)
    );
}

#[tokio::test]
async fn volume_mounted_over_the_shim_is_found() {
    for (more, point) in [
        (
            "mount -t tmpfs none $ROOT/opt/bursar/lib",
            "/opt/bursar/lib",
        ),
        ("mkdir -p $ROOT/v; mount -t tmpfs none $ROOT/etc", "/etc"),
        (
            "cp $ROOT/opt/bursar/lib/libcuda.so.1 $ROOT/x; mount --bind $ROOT/x $ROOT/opt/bursar/lib/libcuda.so.1",
            "libcuda.so.1",
        ),
    ] {
        assert_within(FINDING_LIMIT, async || {
            let machine = machine("").await;
            let pod = admit_pod(&machine, "a").await;
            let _container = Container::start(&machine, &pod, Start { more, with: "" }).await;
            let took = wait_until_not_enforced(&machine, "MountedOver").await;
            wait_for_log(&machine, point).await;
            took
        })
        .await;
    }
}

#[tokio::test]
async fn driver_copy_in_the_image_is_found_when_mapped() {
    assert_within(FINDING_LIMIT, async || {
        let machine = machine("").await;
        let pod = admit_pod(&machine, "a").await;
        let more = "mkdir $ROOT/mine; cp $ROOT/opt/bursar/drv/cuda.so.1 $ROOT/mine/libcuda.so.9";
        let mut container = Container::start(&machine, &pod, Start { more, with: "" }).await;
        wait_for_value(&machine, "bursar_container_enforced", r#"reason="""#, 1).await;
        container.ok("open /mine/libcuda.so.9");
        wait_until_not_enforced(&machine, "ForeignDriver").await
    })
    .await;
}

/// Simulates a process that waits in the kernel for a file of an unreachable server.
#[tokio::test]
async fn unreadable_process_hides_no_other_pod() {
    let mut machine = machine("").await;
    let (hung, other) = (
        admit_pod(&machine, "a").await,
        admit_pod(&machine, "b").await,
    );
    let mut container = Container::start(&machine, &hung, PLAIN).await;
    wait_for_value(&machine, "bursar_container_enforced", r#"reason="""#, 1).await;
    let maps = machine.path(&format!("proc/{}/maps", container.pid()));
    std::fs::remove_file(&maps).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, &maps, 0o600.into()).unwrap();
    // The process's mappings change, so the agent reads them again, and this read never ends.
    container.ok("open libcuda.so.1");
    let audited = r#"layer="audit""#;
    wait_for_value(&machine, "bursar_container_layer", audited, 0).await;
    let more = "mkdir $ROOT/mine; cp $ROOT/opt/bursar/drv/cuda.so.1 $ROOT/mine/libcuda.so.9";
    let mut bypass = Container::start(&machine, &other, Start { more, with: "" }).await;
    bypass.ok("open /mine/libcuda.so.9");
    wait_until_not_enforced(&machine, "ForeignDriver").await;
    assert!(machine.stop_agent().await.success());
}

#[tokio::test]
async fn program_without_environment_stays_enforced() {
    let machine = machine("").await;
    let pod = admit_pod(&machine, "a").await;
    let lab = format!("env -i SIMGPU_DIR={}", machine.lab.path().display());
    let start = Start {
        more: "",
        with: &lab,
    };
    let mut container = Container::start(&machine, &pod, start).await;
    container.ok("open libcuda.so.1");
    let info = container.call("info");
    assert!(info.ends_with(&format!(" {}", 8 * GIB)), "{info}");
    assert_eq!(container.call(&format!("alloc {}", 8 * GIB + 1)), "err 2");
    wait_for_value(&machine, "bursar_container_enforced", r#"reason="""#, 1).await;
}

#[tokio::test]
async fn tampered_credit_page_is_found() {
    assert_within(FINDING_LIMIT, async || {
        let machine = machine("").await;
        let pod = admit_pod(&machine, "a").await;
        let mut container = Container::start(&machine, &pod, PLAIN).await;
        container.ok("open libcuda.so.1");
        container.ok(&format!("alloc {GIB}"));
        container.ok("scribble");
        wait_for_value(&machine, "bursar_agent_findings_total", "tampered-page", 1).await
    })
    .await;
}

#[tokio::test]
async fn credit_page_is_sealed_and_closed_socket_frees_nothing() {
    let machine = machine("").await;
    let pod = admit_pod(&machine, "a").await;
    let mut container = Container::start(&machine, &pod, PLAIN).await;
    container.ok("open libcuda.so.1");
    container.ok(&format!("alloc {}", 5 * GIB));
    assert!(container.call("truncate").starts_with("err"));
    container.ok("close");
    tokio::time::sleep(SEVERAL_AUDITS).await;
    let used = "bursar_container_memory_used_bytes";
    let used = metric_value(&machine, used, r#"account="GPU-"#).await;
    assert!(used >= Some((5 * GIB) as i64), "{used:?}");
    assert_eq!(container.call(&format!("alloc {}", 4 * GIB)), "err 2");
    container.ok(&format!("alloc {}", 2 * GIB));
    assert_eq!(count_findings(&machine, "untracked-process").await, 0);
}

#[tokio::test]
async fn memory_of_silent_processes_stays_withheld_after_restart() {
    let mut machine = machine("").await;
    let pod = admit_pod(&machine, "a").await;
    let mut silent = Container::start(&machine, &pod, PLAIN).await;
    silent.ok("open libcuda.so.1");
    silent.ok(&format!("alloc {}", 6 * GIB));
    machine.kill_agent();
    std::fs::remove_dir_all(machine.path("run/sessions")).unwrap();
    machine.start_successor().await;
    let untracked = r#"account="GPU- part="untracked""#;
    let memory = "bursar_container_memory_charged_bytes";
    wait_for_metric(&machine, memory, untracked, |bytes| {
        bytes >= (6 * GIB) as i64
    })
    .await;
    let mut other = Container::start(&machine, &pod, PLAIN).await;
    other.ok("open libcuda.so.1");
    assert_eq!(other.call(&format!("alloc {}", 3 * GIB)), "err 2");
    assert_eq!(
        count_findings(&machine, "untracked-process").await,
        0,
        "it was there before the agent"
    );
    // This is more than the program's credit allows without a request to the agent.
    silent.ok(&format!("alloc {}", GIB / 2));
    wait_for_value(
        &machine,
        "bursar_container_memory_charged_bytes",
        untracked,
        0,
    )
    .await;
    assert_eq!(other.call(&format!("alloc {}", 3 * GIB)), "err 2");
    other.ok("alloc 4096");
}
