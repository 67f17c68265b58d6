//! Parses the program's arguments.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args as Group, Parser, Subcommand, ValueEnum};

/// A small CUDA program: reports devices, allocates memory and holds it.
#[derive(Debug, Parser)]
#[command(name = "bursar-probe", version)]
pub(crate) struct Args {
    /// The exit code after SIGTERM or SIGINT
    #[arg(long, global = true, default_value_t = 0)]
    pub(crate) told: u8,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Print the devices and the memory that the driver reports
    Report,
    /// Allocate an amount, then hold it
    Hold {
        /// How much, as 6Gi
        #[arg(long, value_parser = bytes)]
        bytes: u64,
        #[command(flatten)]
        take: AllocationArgs,
    },
    /// Allocate until the driver refuses
    Greedy {
        #[command(flatten)]
        take: AllocationArgs,
    },
    /// Allocate an amount and free it, repeatedly until SIGTERM; exit when the driver refuses
    Churn {
        /// How much, as 6Gi
        #[arg(long, value_parser = bytes)]
        bytes: u64,
        /// The size of one allocation
        #[arg(long, value_parser = bytes, default_value = "256Mi")]
        chunk: u64,
    },
    /// Launch a kernel that reads address 0 while the file records fewer than `times` such
    /// starts, then hold an amount. The process exits after the fault, unless it is blind
    Fault {
        /// The number of starts that fault
        #[arg(long)]
        times: usize,
        /// The file that records the starts that fault, a line each; the start that does not fault
        /// prints them all
        #[arg(long, default_value = "/faults")]
        file: PathBuf,
        /// The amount to hold, as 6Gi
        #[arg(long, value_parser = bytes, default_value = "1Gi")]
        bytes: u64,
        /// The amount of retained memory for later process images, as 64Mi
        #[arg(long, value_parser = bytes)]
        retain: Option<u64>,
        /// Seconds from the start to the fault
        #[arg(long, default_value_t = 0)]
        after: u64,
        /// Go on after the fault, like a program that ignores the driver's errors
        #[arg(long)]
        blind: bool,
    },
    /// Write an amount of retained memory, or read what an earlier process wrote, then exit
    Retain {
        /// How much, as 64Mi
        #[arg(long, value_parser = bytes)]
        bytes: u64,
    },
    /// Export an amount, send the descriptor to the `park` at a socket, then exit
    Export {
        /// How much, as 64Mi: a multiple of the driver's granularity
        #[arg(long, value_parser = bytes)]
        bytes: u64,
        /// The socket of `park`
        #[arg(long)]
        to: PathBuf,
    },
    /// Hold the descriptors that arrive at a socket, without a GPU
    Park {
        /// The socket, which this command creates
        #[arg(long)]
        socket: PathBuf,
    },
    /// Run this program as a worker with the arguments that follow, and again each time that the
    /// worker ends, like a server of notebooks. Uses no GPU itself
    Serve {
        /// The arguments of the worker
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        worker: Vec<String>,
    },
    /// Allocate and free as the lines of standard input say: `take 4Gi`, `free 1Gi`, `look`. Prints
    /// a line for each
    Obey,
}

/// A line of input to [`Command::Obey`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StdinCommand {
    /// Allocate this much more, until the driver refuses.
    Take(u64),
    /// Free this much.
    Free(u64),
    /// Report the memory, and change nothing.
    Report,
}

impl FromStr for StdinCommand {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        match line.split_once(' ') {
            Some(("take", amount)) => Ok(Self::Take(bytes(amount)?)),
            Some(("free", amount)) => Ok(Self::Free(bytes(amount)?)),
            None if line == "look" => Ok(Self::Report),
            _ => Err(format!("`{line}` is not take, free or look")),
        }
    }
}

/// How a command allocates, and what it does afterwards.
#[derive(Debug, Group)]
pub(crate) struct AllocationArgs {
    /// The size of one allocation
    #[arg(long, value_parser = bytes, default_value = "256Mi")]
    pub(crate) chunk: u64,
    /// Allocate managed memory, and move it to the GPU
    #[arg(long)]
    pub(crate) managed: bool,
    /// The device's ordinal
    #[arg(long, default_value_t = 0)]
    pub(crate) device: u32,
    /// The use of the memory afterwards; `hold` keeps it until SIGTERM
    #[arg(long, value_enum, default_value_t = Then::Hold)]
    pub(crate) then: Then,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Then {
    /// Exit, which frees it.
    Exit,
    /// Keep it until SIGTERM.
    Hold,
    /// Keep it for five seconds, then exit.
    Linger,
}

/// Parses a Kubernetes quantity: a whole number of bytes, or of Ki, Mi, Gi or Ti.
fn bytes(text: &str) -> Result<u64, String> {
    let split = text
        .find(|character: char| !character.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let shift = match unit {
        "" => 0,
        "Ki" => 10,
        "Mi" => 20,
        "Gi" => 30,
        "Ti" => 40,
        _ => return Err(format!("`{unit}` is not Ki, Mi, Gi or Ti")),
    };
    let number: u64 = number
        .parse()
        .map_err(|_| "not a whole number".to_owned())?;
    match number.checked_mul(1 << shift) {
        Some(bytes) if bytes > 0 => Ok(bytes),
        _ => Err("must be more than nothing, and fit in 64 bits".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_parses_kubernetes_quantities() {
        assert_eq!(bytes("6Gi"), Ok(6 << 30));
        assert_eq!(bytes("4096"), Ok(4096));
        for bad in ["", "0", "Gi", "6GB", "-1Gi", "1.5Gi", "99999999999Ti"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn stdin_command_parses_word_and_amount() {
        assert_eq!("take 4Gi".parse(), Ok(StdinCommand::Take(4 << 30)));
        assert_eq!("free 256Mi".parse(), Ok(StdinCommand::Free(256 << 20)));
        assert_eq!("look".parse(), Ok(StdinCommand::Report));
        for bad in ["", "take", "take 0", "look 1Gi", "give 1Gi"] {
            assert!(bad.parse::<StdinCommand>().is_err(), "{bad}");
        }
    }

    #[test]
    fn arguments_pass_clap_debug_assert() {
        use clap::CommandFactory as _;
        Args::command().debug_assert();
    }
}
