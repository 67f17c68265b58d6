//! Runs programs in an image's folder, with the mounts of its CDI device as runc makes them.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Component, Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use bursar_node::cdi::ContainerEdits;

use crate::trace;

/// A mount namespace in which the image has its mounts.
pub struct Container {
    keeper: Child,
    root: PathBuf,
    env: Vec<String>,
}

impl Container {
    /// Applies the mounts of `edits` to the image `root`, whose `/proc/driver` shows `kernel`.
    pub fn new(root: &Path, edits: &ContainerEdits, kernel: &Path) -> Container {
        let mut table = format!(
            "/proc {root}/proc none rbind 0 0\n{kernel} {root}/proc/driver none bind 0 0\n",
            root = root.display(),
            kernel = kernel.display()
        );
        let nodes = edits
            .device_nodes
            .iter()
            .map(|node| (&node.host_path, &node.path, "bind".to_owned()));
        let mounts = edits.mounts.iter().map(|mount| {
            (
                &mount.host_path,
                &mount.container_path,
                mount.options.join(","),
            )
        });
        let mut all: Vec<_> = nodes.chain(mounts).collect();
        // containerd orders mounts so.
        all.sort_by_key(|(_, target, _)| target.components().count());
        for (source, target, options) in all {
            let target = make_target(root, target, source.is_dir());
            let line = format!(
                "{} {} none {options} 0 0\n",
                source.display(),
                target.display()
            );
            table.push_str(&line);
        }
        let file = root.with_extension("mounts");
        fs::write(&file, table).unwrap();
        let mut keeper = Command::new("unshare");
        keeper
            .args([
                "--mount",
                "sh",
                "-c",
                "mount -a -T \"$0\" && echo ready && exec cat",
            ])
            .arg(&file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut keeper = keeper.spawn().unwrap();
        let mut line = String::new();
        let output = keeper.stdout.as_mut().unwrap();
        BufReader::new(output).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n", "the mounts could be made (root is needed)");
        Container {
            keeper,
            root: root.to_owned(),
            env: edits.env.clone(),
        }
    }

    /// Starts a program of the image as this user, with the variables of the device and `env`.
    pub fn start(&self, command: &[&str], user: u32, env: &[(&str, &str)]) -> Running {
        let device = self
            .env
            .iter()
            .filter_map(|variable| variable.split_once('='));
        let env: Vec<_> = device.chain(env.iter().copied()).collect();
        Running::of(self.spawn(command, user, &env, false))
    }

    /// Starts a program with no variables but these.
    pub fn start_bare(&self, command: &[&str], env: &[(&str, &str)]) -> Running {
        Running::of(self.spawn(command, 0, env, false))
    }

    /// Returns the system calls of a program that runs to its end.
    pub fn trace(&self, program: &str) -> trace::Calls {
        trace::calls(&mut self.spawn(&[program], 0, &[], true))
    }

    fn spawn(&self, command: &[&str], user: u32, env: &[(&str, &str)], traced: bool) -> Child {
        let namespace = fs::File::open(format!("/proc/{}/ns/mnt", self.keeper.id())).unwrap();
        let root = std::ffi::CString::new(self.root.to_str().unwrap()).unwrap();
        let mut program = Command::new(command[0]);
        program
            .args(&command[1..])
            .env_clear()
            .envs(env.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let enter = move || {
            // SAFETY: system calls with an open descriptor and a string that ends with a zero.
            let entered = unsafe {
                libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNS) == 0
                    && libc::chroot(root.as_ptr()) == 0
                    && libc::chdir(c"/".as_ptr()) == 0
                    && libc::setgroups(0, std::ptr::null()) == 0
                    && libc::setgid(user) == 0
                    && libc::setuid(user) == 0
                    && (!traced || libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) == 0)
            };
            match entered {
                true => Ok(()),
                false => Err(std::io::Error::last_os_error()),
            }
        };
        // SAFETY: the closure between fork and exec makes system calls only.
        unsafe { program.pre_exec(enter) };
        program
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"))
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}

/// A program that has printed its results, and lives until this is dropped.
pub struct Running {
    child: Child,
    /// The printed lines.
    pub lines: Vec<String>,
    /// Whether the program printed everything.
    pub whole: bool,
}

impl Running {
    fn of(mut child: Child) -> Running {
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut lines = Vec::new();
        let mut whole = false;
        for line in output.lines() {
            let line = line.unwrap();
            if line == "end" {
                whole = true;
                break;
            }
            lines.push(line);
        }
        Running {
            child,
            lines,
            whole,
        }
    }

    /// Returns the pid in this test's pid namespace.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the rest of the line that begins with this word.
    pub fn line_after(&self, word: &str) -> Option<&str> {
        self.lines
            .iter()
            .find_map(|line| line.strip_prefix(word)?.strip_prefix(' '))
    }

    /// Returns whether the program has mapped a file of this path or below this folder.
    pub fn has_mapped(&self, path: &str) -> bool {
        let mut mapped = self
            .lines
            .iter()
            .filter_map(|line| line.strip_prefix("mapped "));
        mapped.any(|file| Path::new(file).starts_with(path))
    }

    /// Ends the program. Returns its standard error.
    pub fn end(mut self) -> (ExitStatus, String) {
        drop(self.child.stdin.take());
        let mut error = String::new();
        let mut stream = self.child.stderr.take().unwrap();
        std::io::Read::read_to_string(&mut stream, &mut error).unwrap();
        (self.child.wait().unwrap(), error)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Resolves `target` in the image, with every link followed below `root`. Creates it where it is
/// missing, as runc does (`libcontainer/rootfs_linux.go`, `createMountpoint`).
fn make_target(root: &Path, target: &Path, folder: bool) -> PathBuf {
    let mut done = PathBuf::new();
    let mut left: Vec<_> = parts(target);
    while let Some(part) = left.pop() {
        if part == ".." {
            done.pop();
            continue;
        }
        let here = root.join(&done).join(&part);
        match here.read_link() {
            Ok(link) => {
                if link.is_absolute() {
                    done.clear();
                }
                left.extend(parts(&link));
            }
            Err(_) => {
                done.push(part);
            }
        }
    }
    let path = root.join(done);
    if folder {
        fs::create_dir_all(&path).unwrap();
    } else if !path.exists() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "").unwrap();
    }
    path
}

/// Returns the path's components, the first last.
fn parts(path: &Path) -> Vec<std::ffi::OsString> {
    let named = path.components().rev().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    named.collect()
}
