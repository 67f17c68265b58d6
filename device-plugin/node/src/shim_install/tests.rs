use bursar_host::driver_files::{DriverFile, LIBNVML};

use super::*;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

#[path = "../../../shim/common/tests/support/elf.rs"]
#[allow(unreachable_pub, reason = "the shims' tests have it too")]
mod elf;

/// The functions of the node's driver.
const FUNCTIONS: &[&str] = &["cuInit", "cuMemAlloc_v2", "cuMemFree_v2"];

/// Compiles a shared library with these functions.
fn compile_library(path: &Path, functions: &[&str]) {
    let source: String = functions
        .iter()
        .map(|name| format!("int {name}(void) {{ return 0; }}\n"))
        .collect();
    let file = path.with_extension("c");
    fs::write(&file, source).unwrap();
    let mut compile = Command::new("cc");
    compile
        .args(["-shared", "-fPIC", "-o"])
        .arg(path)
        .arg(&file);
    assert!(compile.status().unwrap().success());
    fs::remove_file(file).unwrap();
}

/// The agent's image, the host's driver and the state directory.
struct FakeMachine {
    folder: tempfile::TempDir,
}

impl FakeMachine {
    /// A machine whose driver has these functions.
    fn new(driver: &[&str]) -> FakeMachine {
        let machine = FakeMachine {
            folder: tempfile::tempdir().unwrap(),
        };
        for name in ["image", "state"] {
            fs::create_dir(machine.path(name)).unwrap();
        }
        for entry in ENTRIES {
            fs::write(machine.path("image").join(entry.soname), "a shim").unwrap();
        }
        compile_library(&machine.path("driver.so"), driver);
        compile_library(&machine.path("nvml.so"), &["nvmlInit_v2"]);
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn install(&self) -> Result<PathBuf, ShimInstallError> {
        let file = |soname: &str, path: &str| DriverFile {
            soname: soname.to_owned(),
            path: self.path(path),
            host_path: self.path(path),
            stamp: Default::default(),
        };
        let driver = Driver {
            libcuda: file(LIBCUDA, "driver.so"),
            libnvml: file(LIBNVML, "nvml.so"),
            helpers: vec![],
            smi: None,
            version: None,
            control_nodes: vec![],
            dev_root: "/dev".into(),
        };
        install(&self.path("image"), &driver, &self.path("state"))
    }

    fn builds(&self) -> usize {
        fs::read_dir(self.path("state/shim")).unwrap().count()
    }
}

fn exported_functions(build: &Path) -> Vec<String> {
    let names = symbols::exported_names(&build.join(LIBCUDA)).unwrap();
    names
        .into_iter()
        .map(|name| String::from_utf8(name).unwrap())
        .filter(|name| name.starts_with("cu"))
        .collect()
}

#[test]
fn second_install_of_the_same_build_changes_nothing() {
    let machine = FakeMachine::new(FUNCTIONS);
    let first = machine.install().unwrap();
    let inode = first.join(LIBCUDA).metadata().unwrap().ino();
    assert_eq!(machine.install().unwrap(), first);
    assert_eq!(first.join(LIBCUDA).metadata().unwrap().ino(), inode);
    assert_eq!(machine.builds(), 1);
}

#[test]
fn upgrade_leaves_files_that_containers_have_mapped() {
    let machine = FakeMachine::new(FUNCTIONS);
    let old = machine.install().unwrap();
    let before = fs::read(old.join(LIBCUDA)).unwrap();
    fs::write(machine.path("image/libcuda.so.1"), "another shim").unwrap();
    let shim = machine.install().unwrap();
    compile_library(&machine.path("driver.so"), &["cuMemFree_v2"]);
    let driver = machine.install().unwrap();
    assert_eq!(machine.builds(), 3);
    assert_eq!(fs::read(old.join(LIBCUDA)).unwrap(), before);
    assert_eq!(fs::read(old.join("cuda-shim.so")).unwrap(), b"a shim");
    assert_eq!(
        fs::read(shim.join("cuda-shim.so")).unwrap(),
        b"another shim"
    );
    assert_eq!(exported_functions(&shim), FUNCTIONS);
    assert_eq!(exported_functions(&driver), ["cuMemFree_v2"]);
}

#[test]
fn builds_are_removed_when_no_cdi_file_mounts_them() {
    let machine = FakeMachine::new(FUNCTIONS);
    let state = machine.path("state");
    let mounted = machine.install().unwrap();
    for number in 0..10 {
        fs::write(machine.path("image/libcuda.so.1"), format!("shim {number}")).unwrap();
        let current = machine.install().unwrap();
        let in_use = [
            mounted.join(LIBCUDA),
            "/usr/lib/libcuda.so.1".into(),
            current.clone(),
        ];
        remove_unused(&state, &in_use).unwrap();
        assert!(mounted.join(LIBCUDA).exists() && current.join(LIBCUDA).exists());
        assert_eq!(machine.builds(), 2);
    }
    // A build that another agent is creating.
    fs::create_dir(state.join("shim/.being-made.7")).unwrap();
    let current = machine.install().unwrap();
    remove_unused(&state, std::slice::from_ref(&current)).unwrap();
    assert!(!mounted.exists());
    assert_eq!(machine.builds(), 2, "the current and the hidden one");
    assert_eq!(machine.install().unwrap(), current);
}

#[test]
fn symbols_that_the_driver_lacks_are_hidden() {
    let machine = FakeMachine::new(&["cuMemAlloc_v2", "cuInit", "cuUnknownToTheShim"]);
    let build = machine.install().unwrap();
    assert_eq!(exported_functions(&build), ["cuInit", "cuMemAlloc_v2"]);
}

#[test]
fn entry_is_unchanged_when_the_driver_has_every_symbol() {
    let machine = FakeMachine::new(FUNCTIONS);
    let entry = machine.path("entry.so");
    fs::write(&entry, ENTRIES[0].library).unwrap();
    let names = symbols::exported_names(&entry).unwrap();
    let names: Vec<&str> = names
        .iter()
        .map(|name| str::from_utf8(name).unwrap())
        .collect();
    assert!(names.len() >= 682 + 25, "{}", names.len());
    compile_library(&machine.path("driver.so"), &names);
    let build = machine.install().unwrap();
    assert_eq!(fs::read(build.join(LIBCUDA)).unwrap(), ENTRIES[0].library);
}

/// Every program of a container loads the entries, on any glibc since 2.17.
#[test]
#[cfg(target_arch = "x86_64")]
fn entries_need_an_old_glibc_and_no_other_library() {
    let folder = tempfile::tempdir().unwrap();
    for entry in ENTRIES {
        let path = folder.path().join(entry.soname);
        fs::write(&path, entry.library).unwrap();
        elf::needs_an_old_glibc(&path);
        elf::needs_exactly(&path, &["libc.so.6"]);
        elf::is_named_and_stays_loaded(&path, entry.soname);
    }
}

/// Each segment, relocation and constructor costs every program of a container time.
#[test]
fn entries_load_with_two_segments_and_few_relocations() {
    let folder = tempfile::tempdir().unwrap();
    for entry in ENTRIES {
        let path = folder.path().join(entry.soname);
        fs::write(&path, entry.library).unwrap();
        let read = |option: &str| elf::tool_output("readelf", option, &path);
        let count =
            |text: &str, word: &str| text.lines().filter(|line| line.contains(word)).count();
        let segments = read("-lW");
        assert_eq!(count(&segments, " LOAD "), 2, "{segments}");
        assert_eq!(count(&segments, "GNU_RELRO"), 0, "{segments}");
        let relocations = read("-rW");
        assert!(
            (1..=12).contains(&count(&relocations, "R_")),
            "{relocations}"
        );
        let dynamic = read("-d");
        assert_eq!(count(&dynamic, "INIT_ARRAY"), 0, "{dynamic}");
        // The entry of libcuda opens the shim in a container's first process.
        let starts = count(&dynamic, "(INIT)");
        assert_eq!(starts, usize::from(entry.soname == LIBCUDA), "{dynamic}");
    }
}

/// The constructor of an entry runs before those of libraries that the program preloads.
#[test]
fn first_process_starts_beside_a_library_with_its_own_dlopen() {
    let machine = FakeMachine::new(FUNCTIONS);
    let build = machine.install().unwrap();
    let (source, library) = (machine.path("own.c"), machine.path("own.so"));
    fs::write(
        &source,
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n\
         static void *(*next)(const char *, int);\n\
         __attribute__((constructor)) static void start(void) { next = dlsym(RTLD_NEXT, \"dlopen\"); }\n\
         void *dlopen(const char *file, int mode) { return next(file, mode); }\n",
    )
    .unwrap();
    let mut compile = Command::new("cc");
    compile
        .args(["-shared", "-fPIC", "-o"])
        .args([&library, &source]);
    assert!(compile.status().unwrap().success());
    let preload = [&library, &build.join(LIBCUDA), &build.join(LIBNVML)];
    let preload = preload.map(|path| path.display().to_string()).join(" ");
    let ended = Command::new("unshare")
        .args(["--pid", "--fork", "env"])
        .arg(format!("LD_PRELOAD={preload}"))
        .args(["/bin/sh", "-c", "test $$ = 1"])
        .status()
        .unwrap();
    assert!(ended.success(), "{ended}");
}

/// The image of a program that changed its root, say, lacks the shims.
#[test]
fn entries_return_the_drivers_error_without_a_shim() {
    let machine = FakeMachine::new(FUNCTIONS);
    let build = machine.install().unwrap();
    let source = machine.path("calls.c");
    let program = machine.path("calls");
    fs::write(
        &source,
        "int cuInit(int), nvmlInit_v2(void);\n\
         int main(void) { return !(cuInit(0) == 303 && cuInit(0) == 303 && nvmlInit_v2() == 12); }",
    )
    .unwrap();
    let mut compile = Command::new("cc");
    compile.arg("-o").args([&program, &source]);
    compile.args(ENTRIES.map(|entry| build.join(entry.soname)));
    assert!(compile.status().unwrap().success());
    let ended = Command::new(&program)
        .env("LD_LIBRARY_PATH", &build)
        .status()
        .unwrap();
    assert!(ended.success(), "{ended}");
}

#[test]
fn malformed_driver_library_is_named() {
    let machine = FakeMachine::new(FUNCTIONS);
    fs::write(machine.path("driver.so"), "").unwrap();
    let error = machine.install().unwrap_err().to_string();
    assert!(error.contains("driver.so"), "{error}");
}

#[test]
fn files_are_world_readable_and_preload_lists_them() {
    let machine = FakeMachine::new(FUNCTIONS);
    let build = machine.install().unwrap();
    for (name, mode) in [
        (LIBCUDA, 0o755),
        (LIBNVML, 0o755),
        ("cuda-shim.so", 0o755),
        ("nvml-shim.so", 0o755),
        (STUB, 0o755),
        (PRELOAD_FILE, 0o644),
    ] {
        let file = build.join(name).metadata().unwrap();
        assert_eq!(file.mode() & 0o777, mode, "{name}");
    }
    assert_eq!(build.metadata().unwrap().mode() & 0o777, 0o755);
    assert_eq!(
        fs::read_to_string(build.join(PRELOAD_FILE)).unwrap(),
        "/opt/bursar/lib/libcuda.so.1\n/opt/bursar/lib/libnvidia-ml.so.1\n/opt/bursar/lib/cuda-stub.so\n"
    );
    assert_eq!(
        fs::read_link(build.join("libcuda.so")).unwrap(),
        Path::new(LIBCUDA)
    );
}

#[test]
fn stub_is_called_libcuda_so_and_needs_the_entry() {
    let machine = FakeMachine::new(FUNCTIONS);
    let build = machine.install().unwrap();
    let output = Command::new("readelf")
        .args(["--dynamic", "--segments", "--wide"])
        .arg(build.join(STUB))
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    for part in [
        "soname: [libcuda.so]",
        "Shared library: [libcuda.so.1]",
        "GNU_STACK",
    ] {
        assert!(text.contains(part), "{part} is missing in: {text}");
    }
    assert!(!text.contains("RWE"), "no stack becomes executable: {text}");
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
}

#[test]
fn missing_shim_in_the_image_is_named() {
    let machine = FakeMachine::new(FUNCTIONS);
    fs::remove_file(machine.path("image/libcuda.so.1")).unwrap();
    let error = machine.install().unwrap_err().to_string();
    assert!(
        error.contains("libcuda.so.1") && error.contains("paths.shim-dir"),
        "{error}"
    );
}

#[test]
fn damaged_build_is_repaired_without_changing_mapped_files() {
    let machine = FakeMachine::new(FUNCTIONS);
    let build = machine.install().unwrap();
    let whole = fs::read(build.join(LIBCUDA)).unwrap();
    let files = fs::read_dir(&build).unwrap().count();
    for damage in ["", "bui", "BUILD"] {
        let mapped = File::open(build.join(LIBCUDA)).unwrap();
        fs::write(build.join(LIBCUDA), damage).unwrap();
        for name in [PRELOAD_FILE, DEV_LINK, STUB] {
            fs::remove_file(build.join(name)).unwrap();
        }
        assert_eq!(machine.install().unwrap(), build);
        assert_eq!(fs::read(build.join("libcuda.so")).unwrap(), whole);
        assert!(build.join(PRELOAD_FILE).is_file());
        assert_eq!(mapped.metadata().unwrap().len(), damage.len() as u64);
        assert_eq!(fs::read_dir(&build).unwrap().count(), files);
    }
}

#[test]
fn stale_temporary_dirs_are_removed_and_fresh_ones_stay() {
    let machine = FakeMachine::new(FUNCTIONS);
    let builds = machine.path("state/shim");
    for name in [".old.1", ".new.2"] {
        fs::create_dir_all(builds.join(name)).unwrap();
    }
    let long_ago = std::time::SystemTime::now() - 2 * STALE_AFTER;
    File::open(builds.join(".old.1"))
        .and_then(|folder| folder.set_modified(long_ago))
        .unwrap();
    machine.install().unwrap();
    assert!(!builds.join(".old.1").exists() && builds.join(".new.2").exists());
}
