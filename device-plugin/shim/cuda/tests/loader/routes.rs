//! Lists the ways around the shim with their outcomes: some are tried here, and others cite a test.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::container::Container;
use crate::images::{Base, Compat};
use crate::machine::{Machine, Outcome, QUOTA};
use crate::programs::COMPAT;

/// A way that is tried here: its description, and the program's command line and variables.
struct Tried {
    route: &'static str,
    command: &'static [&'static str],
    env: &'static [(&'static str, &'static str)],
}

/// A placeholder in a command for the quota's bytes.
const BYTES: &str = "<bytes>";
/// 14 GiB: above the quota by more than the audit allows a process for what the driver takes
/// itself.
const OVER: &str = "15032385536";
const CLIENT: &str = "/usr/bin/client";
const LOADER: &str = match cfg!(target_arch = "x86_64") {
    true => "/lib64/ld-linux-x86-64.so.2",
    false => "/lib/ld-linux-aarch64.so.1",
};
/// The image's loader, changed so that it reads another file than `/etc/ld.so.preload`.
const OWN_LOADER: &str = "/usr/bin/own-loader";
const OWN: &str = "/usr/local/cuda/compat/libcuda.so.1";

const fn tried(
    route: &'static str,
    command: &'static [&'static str],
    env: &'static [(&'static str, &'static str)],
) -> Tried {
    Tried {
        route,
        command,
        env,
    }
}

const TRIED: &[Tried] = &[
    tried(
        "every variable unset (`env -i`)",
        &[CLIENT, BYTES, "open", "libcuda.so.1"],
        &[],
    ),
    tried(
        "`LD_PRELOAD` of another library",
        &[CLIENT, BYTES, "open", "libcuda.so.1"],
        &[("LD_PRELOAD", "libm.so.6")],
    ),
    tried(
        "`LD_PRELOAD` of the image's own libcuda",
        &[CLIENT, BYTES, "open", "libcuda.so.1"],
        &[("LD_PRELOAD", OWN)],
    ),
    tried(
        "the loader run by hand",
        &[LOADER, CLIENT, BYTES, "open", "libcuda.so.1"],
        &[],
    ),
    tried(
        "the same with `--library-path` to the image's own libcuda, `--inhibit-cache`",
        &[
            LOADER,
            "--library-path",
            COMPAT,
            "--inhibit-cache",
            CLIENT,
            BYTES,
            "open",
            "libcuda.so.1",
        ],
        &[],
    ),
    tried(
        "the same with `--preload` of the image's own libcuda",
        &[
            LOADER,
            "--preload",
            OWN,
            CLIENT,
            BYTES,
            "open",
            "libcuda.so.1",
        ],
        &[],
    ),
    tried(
        "a loader of the image's own, which preloads nothing",
        &[
            OWN_LOADER,
            "--library-path",
            COMPAT,
            CLIENT,
            BYTES,
            "open",
            "libcuda.so.1",
        ],
        &[],
    ),
    tried(
        "the same, and the driver's file opened by its path",
        &[
            OWN_LOADER,
            CLIENT,
            BYTES,
            "open",
            "/opt/bursar/drv/cuda.so.1",
        ],
        &[],
    ),
    tried(
        "the driver's file opened by its path, beside the shim",
        &[CLIENT, BYTES, "open", "/opt/bursar/drv/cuda.so.1"],
        &[],
    ),
    tried(
        "exec of a program with another C library",
        &["/usr/bin/client-musl", BYTES, "open", "libcuda.so.1"],
        &[],
    ),
    tried(
        "a function of a table that `cuGetExportTable` hands out",
        &[CLIENT, OVER, "table", "libcuda.so.1"],
        &[],
    ),
    tried(
        "the session's socket closed",
        &[CLIENT, BYTES, "close", "libcuda.so.1"],
        &[],
    ),
];

/// A way that a test elsewhere covers: its description, outcome, and the test's file and name.
struct Cited {
    route: &'static str,
    comes_to: &'static str,
    file: &'static str,
    test: &'static str,
}

const CITED: &[Cited] = &[
    Cited {
        route: "a forked child uses its parent's driver",
        comes_to: "prevented",
        file: "device-plugin/shim/cuda/tests/quota.rs",
        test: "forked_child_uses_none_of_its_parents_credit",
    },
    Cited {
        route: "the credit page truncated, or mapped anew",
        comes_to: "prevented",
        file: "device-plugin/protocol/src/credit_page.rs",
        test: "tenant_cannot_resize_or_seal_the_page",
    },
    Cited {
        route: "another grant written into the credit page",
        comes_to: "detected (tampered-page)",
        file: "device-plugin/enforcement/src/audit/compare/tests.rs",
        test: "tampered_page_is_a_finding_without_any_gpu_sample",
    },
    Cited {
        route: "a volume at one of our paths or above it",
        comes_to: "prevented by containerd: the device's mounts replace it or lie on it",
        file: "e2e/tests/cluster/attestation.rs",
        test: "covered_driver_files_are_enforced_or_reported",
    },
    Cited {
        route: "a volume inside one of our folders",
        comes_to: "detected (`Enforced` is False: MountedOver)",
        file: "e2e/tests/cluster/attestation.rs",
        test: "covered_driver_files_are_enforced_or_reported",
    },
    Cited {
        route: "a file of the driver that the node renames or removes while a pod has it mounted",
        comes_to: "enforced, and no finding",
        file: "device-plugin/enforcement/src/attestation/evaluate/tests.rs",
        test: "drivers_file_that_the_node_renamed_or_removed_is_no_gap",
    },
    Cited {
        route: "any other mount over, above or inside our paths",
        comes_to: "detected (`Enforced` is False: MountedOver)",
        file: "device-plugin/enforcement/src/attestation/evaluate/tests.rs",
        test: "mount_over_any_of_our_paths_is_a_gap",
    },
    Cited {
        route: "`NVIDIA_VISIBLE_DEVICES=all` in the pod",
        comes_to: "prevented by containerd: the device's variable replaces it",
        file: "e2e/tests/cluster/attestation.rs",
        test: "covered_driver_files_are_enforced_or_reported",
    },
    Cited {
        route: "device nodes of other GPUs that the device cgroup lets it open",
        comes_to: "detected (`Enforced` is False: OtherGpus)",
        file: "device-plugin/tests/audit/devices.rs",
        test: "container_that_may_open_another_gpu_is_found",
    },
    Cited {
        route: "device nodes of other GPUs that the device cgroup refuses, made by libcuda or a volume",
        comes_to: "prevented: cannot be opened",
        file: "device-plugin/tests/audit/devices.rs",
        test: "honest_root_programs_cause_no_finding",
    },
    Cited {
        route: "more mapped, mounted or started than the agent reads",
        comes_to: "detected (`Enforced` is False: NotAttested)",
        file: "device-plugin/tests/audit/large.rs",
        test: "attestation_memory_is_bounded_for_huge_processes",
    },
    Cited {
        route: "CAP_SYS_NICE over the host",
        comes_to: "detected (`Enforced` is False: SysNice)",
        file: "device-plugin/tests/audit/devices.rs",
        test: "container_that_may_change_its_timeslice_is_reported",
    },
    Cited {
        route: "a privileged container",
        comes_to: "detected (`Enforced` is False: Privileged)",
        file: "e2e/tests/cluster/attestation.rs",
        test: "covered_driver_files_are_enforced_or_reported",
    },
    Cited {
        route: "memory of another process opened by its handle",
        comes_to: "prevented: its owner pays",
        file: "device-plugin/shim/cuda/tests/vmm.rs",
        test: "owner_pays_for_linear_memory_that_another_process_opens",
    },
    Cited {
        route: "memory left with another process when its own is killed",
        comes_to: "prevented: charged until nobody holds it",
        file: "device-plugin/shim/cuda/tests/exported.rs",
        test: "killed_exporters_memory_stays_charged_while_a_sibling_has_fd",
    },
    Cited {
        route: "memory left with a process outside of the pod when the pod ends",
        comes_to: "prevented: bound to nobody while it is held",
        file: "device-plugin/tests/audit/reclaim.rs",
        test: "memory_held_by_an_outside_process_is_leaked_until_freed",
    },
    Cited {
        route: "`cuMemCreate` by the driver's file opened by its path, without a context",
        comes_to: "detected (holder)",
        file: "device-plugin/tests/audit/findings.rs",
        test: "process_that_holds_memory_without_context_is_found",
    },
    Cited {
        route: "the same beside the whole quota by the shim, which the process says that it exported",
        comes_to: "detected (holder); ended under `kill`",
        file: "device-plugin/tests/audit/findings.rs",
        test: "process_that_holds_memory_without_context_is_killed",
    },
    Cited {
        route: "the same in a process with a session, where the kernel module tells its owner",
        comes_to: "detected (over quota); ended under `kill`",
        file: "device-plugin/enforcement/src/audit/compare/tests.rs",
        test: "contextless_memory_beyond_the_quota_is_found_with_a_session",
    },
    Cited {
        route: "the same in a forked child of a process with a session",
        comes_to: "detected (holder)",
        file: "device-plugin/enforcement/src/audit/compare/tests.rs",
        test: "child_is_a_holder_when_it_maps_the_driver_itself",
    },
    Cited {
        route: "less written as exported before death, and the memory left with another process",
        comes_to: "prevented: charged until nobody holds it",
        file: "device-plugin/tests/audit/reclaim.rs",
        test: "export_denied_before_exit_stays_charged",
    },
    Cited {
        route: "another number of accounts written into the credit page",
        comes_to: "prevented: the agent remembers it",
        file: "device-plugin/protocol/src/credit_page.rs",
        test: "page_keeps_its_accounts_when_a_tenant_overwrites_the_count",
    },
    Cited {
        route: "more processes than the quota has contexts for",
        comes_to: "detected (over-quota)",
        file: "device-plugin/enforcement/src/audit/compare/tests.rs",
        test: "container_is_over_quota_when_contexts_do_not_fit",
    },
    Cited {
        route: "memory that was never told as exported, by a descriptor in another process or in flight",
        comes_to: "detected (unaccounted): bound to nobody, told on the pod or the node, nobody ended",
        file: "device-plugin/enforcement/src/audit/compare/tests.rs",
        test: "unaccounted_memory_names_the_only_container_with_the_gpu",
    },
    Cited {
        route: "the pid of a dead process whose memory is held, taken again",
        comes_to: "detected (unaccounted): the process that has the pid now is not named for it",
        file: "device-plugin/enforcement/src/audit/listings.rs",
        test: "process_that_started_after_the_first_listing_is_not_the_listed_one",
    },
    Cited {
        route: "the container's first process changes its root, or ends its main thread",
        comes_to: "detected (untracked-process), whichever process takes memory; ended under `kill`",
        file: "device-plugin/tests/audit/findings.rs",
        test: "process_is_killed_when_the_first_process_hides_the_mounts",
    },
    Cited {
        route: "device nodes that a container of the pod passes to one without GPU memory",
        comes_to: "detected (untracked-process): charged to the pod; ended under `kill`",
        file: "device-plugin/tests/audit/findings.rs",
        test: "process_in_a_container_without_gpu_memory_is_its_pods",
    },
    Cited {
        route: "memory taken by a process that ends at once, and kept by its forked child",
        comes_to: "detected (holder); ended under `kill` if only one pod has such a process",
        file: "device-plugin/tests/audit/findings.rs",
        test: "child_that_keeps_memory_of_an_ended_process_is_killed",
    },
    Cited {
        route: "the same, and the child opens a session, or has no device node mapped",
        comes_to: "detected (unaccounted): bound to nobody, nobody ended",
        file: "device-plugin/enforcement/src/audit/compare/tests.rs",
        test: "memory_of_a_listed_ended_process_is_unaccounted_once_it_stays",
    },
    Cited {
        route: "memory of an ended exporter that was never told, imported and used",
        comes_to: "detected (holder), where the kernel module tells imports; ended under `kill` if only one pod imported so much",
        file: "device-plugin/enforcement/src/audit/compare/tests.rs",
        test: "importer_is_a_holder_when_it_imports_more_than_anybody_exported",
    },
    Cited {
        route: "a pod without GPU memory that uses a GPU",
        comes_to: "detected (untracked-process); ended under `kill`, but in exempt namespaces",
        file: "device-plugin/tests/audit/findings.rs",
        test: "process_of_a_pod_without_gpu_memory_is_killed_unless_exempt",
    },
    Cited {
        route: "memory without a context or session that outlives its pod",
        comes_to: "detected (unaccounted): bound to nobody while it lasts",
        file: "device-plugin/tests/audit/reclaim.rs",
        test: "uncharged_memory_is_withheld",
    },
    Cited {
        route: "variables in managed memory that the program never looks up",
        comes_to: "detected (over-managed) while the GPU has unaccounted memory",
        file: "device-plugin/tests/audit/managed.rs",
        test: "pod_with_more_managed_memory_than_charged_is_named",
    },
    Cited {
        route: "an init container exports memory, and the main container takes its whole quota besides",
        comes_to: "prevented: one account for the containers of a claim",
        file: "device-plugin/sessions/src/container/tests/siblings.rs",
        test: "exports_count_against_the_next_container_of_a_claim",
    },
    Cited {
        route: "a pod of several containers keeps memory while it waits for more",
        comes_to: "prevented: placed together, or not at all",
        file: "device-plugin/ledger/tests/pod_groups.rs",
        test: "pod_that_does_not_fit_whole_takes_no_memory",
    },
    Cited {
        route: "telling the agent that a context costs more than it does",
        comes_to: "prevented: the agent measures a context of its own",
        file: "device-plugin/sessions/src/tests.rs",
        test: "context_size_is_independent_of_what_tenants_say",
    },
    Cited {
        route: "another namespace's freed memory, where the driver does not clear it",
        comes_to: "prevented: the GPU is for one namespace until the node restarts",
        file: "device-plugin/tests/leases/shared.rs",
        test: "unscrubbed_gpu_serves_one_namespace_until_reboot",
    },
    Cited {
        route: "a pod that asks for nothing and names NVIDIA's variable, RuntimeClass or device nodes",
        comes_to: "prevented by the API server, but in exempt namespaces",
        file: "e2e/tests/api/hostile.rs",
        test: "hostile",
    },
];

/// Tries every route and returns the table as text.
pub fn table(machine: &Machine) -> Result<String, String> {
    let image = machine.image(Base::Glibc, Compat::Configured);
    own_loader(&image);
    musl_loader(&image);
    let container = machine.container(Base::Glibc, Compat::Configured);
    let mut text = String::from("| route | comes to | shown by |\n|---|---|---|\n");
    let mut silent = String::new();
    for Tried {
        route,
        command,
        env,
    } in TRIED
    {
        match outcome(machine, &container, command, env) {
            Ok(word) => {
                let _ = writeln!(
                    text,
                    "| {route} | {word} | `cargo test -p bursar-shim --test loader` |"
                );
            }
            Err(why) => {
                let _ = writeln!(silent, "{route}: {why}");
            }
        }
    }
    for Cited {
        route,
        comes_to,
        file,
        test,
    } in CITED
    {
        let source = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../..")
            .join(file);
        let source = fs::read_to_string(source).unwrap_or_default();
        if !source.contains(&format!("fn {test}(")) {
            let _ = writeln!(silent, "{route}: {file} has no test {test}");
        }
        let _ = writeln!(text, "| {route} | {comes_to} | `{test}` in `{file}` |");
    }
    if silent.is_empty() {
        Ok(text)
    } else {
        Err(silent)
    }
}

fn outcome(
    machine: &Machine,
    container: &Container,
    command: &[&str],
    env: &[(&str, &str)],
) -> Result<String, String> {
    let bytes = QUOTA.to_string();
    let command: Vec<&str> = command
        .iter()
        .map(|word| if *word == BYTES { &bytes } else { *word })
        .collect();
    let running = container.start_bare(&command, env);
    let outcome = machine.outcome(&running)?;
    Ok(match outcome {
        Outcome::Held | Outcome::HeldOverImages => "prevented: held".to_owned(),
        Outcome::NoDriver => "prevented: no driver".to_owned(),
        Outcome::Detected(_) => outcome.word(),
    })
}

/// Patches the loader, as any author of an image could.
fn own_loader(image: &Path) {
    let list = b"/etc/ld.so.preload";
    let mut loader = fs::read(image.join(format!(
        "usr/lib/{}-linux-gnu/{}",
        std::env::consts::ARCH,
        LOADER.rsplit('/').next().unwrap_or_default()
    )))
    .unwrap();
    let at = loader.windows(list.len()).position(|part| part == list);
    loader[at.expect("a loader has the list's name")..][..list.len()]
        .copy_from_slice(b"/etc/no.so.preload");
    let path = image.join(OWN_LOADER.trim_start_matches('/'));
    fs::copy(image.join("usr/bin/client"), &path).unwrap();
    fs::write(path, loader).unwrap();
}

fn musl_loader(image: &Path) {
    let loader = format!("ld-musl-{}.so.1", std::env::consts::ARCH);
    fs::copy(
        Path::new("/lib").join(&loader),
        image.join("usr/lib").join(loader),
    )
    .unwrap();
}
