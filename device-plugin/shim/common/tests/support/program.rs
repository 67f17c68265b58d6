//! Runs a client program that answers line by line, and builds the libraries under it.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A program in a container.
pub struct Client {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Client {
    /// Starts the program, and waits until it is ready.
    pub fn spawn(command: &mut Command) -> Client {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut client = Client {
            child,
            input,
            output,
        };
        assert_eq!(client.read(), "ready");
        client
    }

    pub fn send(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    pub fn read(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Sends one line and returns the answer.
    pub fn call(&mut self, line: impl AsRef<str>) -> String {
        self.send(line.as_ref());
        self.read()
    }

    /// Sends a line that must succeed. Returns the numbers of the answer.
    pub fn ok(&mut self, line: impl AsRef<str>) -> Vec<u64> {
        let answer = self.call(line.as_ref());
        let mut words = answer.split_whitespace();
        assert_eq!(words.next(), Some("ok"), "{}: {answer}", line.as_ref());
        words.map(|word| word.parse().unwrap()).collect()
    }

    /// Returns the program's pid on the host.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills the program by SIGKILL.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
