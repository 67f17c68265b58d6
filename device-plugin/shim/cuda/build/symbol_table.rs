//! Parses `symbols.txt` for the build script, and for the tests that compare the table with
//! libraries and headers.

/// A line of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Symbol<'a> {
    /// A function.
    Function(Function<'a>),
    /// A variable, with its size in bytes.
    Variable(&'a str, usize),
}

/// A function of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function<'a> {
    /// The exported symbol.
    pub name: &'a str,
    /// How the function relates to memory: one of [`CLASSES`].
    pub class: &'a str,
    /// The shim's treatment of the function besides forwarding, or instead.
    pub handling: Option<Handling>,
    /// Why the function is forwarded though it may take memory: one of [`REASONS`].
    pub reason: Option<&'a str>,
    /// How `cuGetProcAddress` names the function, where the headers give it a type for that.
    pub proc: Option<ProcAddress<'a>>,
}

/// The work of the shim in a function, besides forwarding it or instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handling {
    /// The crate implements a function of this name.
    Hook,
    /// The function is forwarded, and its result is checked.
    Watch {
        /// The number of arguments, if these are more than [`REGISTER_ARGUMENTS`].
        arguments: usize,
    },
    /// The function returns NOT_SUPPORTED.
    Refused,
}

/// The number of arguments that need no stack on any processor.
pub const REGISTER_ARGUMENTS: usize = 6;

/// The name and version by which `cuGetProcAddress` finds a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcAddress<'a> {
    /// The name without suffixes.
    pub base: &'a str,
    /// The CUDA version that introduced this form: 12040 is 12.4.
    pub since: u32,
    /// `ptds` or `ptsz`: the form for the per-thread default stream.
    pub per_thread: Option<&'a str>,
}

/// The classes, as the table's header explains them.
pub const CLASSES: [&str; 7] = [
    "allocates",
    "frees",
    "imports",
    "exports",
    "limits",
    "reports",
    "neutral",
];

/// The reasons to forward a function, as the table's header explains them.
pub const REASONS: [&str; 6] = ["covered", "owner", "audit", "graphics", "host", "small"];

/// Parses the table's symbols, in its order.
///
/// # Errors
/// The first line that is not one of the table's forms.
pub fn parse(table: &str) -> Result<Vec<Symbol<'_>>, String> {
    table
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| {
            symbol(line).ok_or_else(|| {
                format!(
                    "failed to parse {line:?} of symbols.txt: write name, class, at most one of \
                     hook, refused, watch and the reasons, and proc="
                )
            })
        })
        .collect()
}

fn symbol(line: &str) -> Option<Symbol<'_>> {
    let mut fields = line.split(' ');
    let (name, class) = (fields.next()?, fields.next()?);
    if class == "data" {
        let size = fields.next()?.parse().ok()?;
        return fields
            .next()
            .is_none()
            .then_some(Symbol::Variable(name, size));
    }
    let (mut handling, mut reason, mut proc) = (None, None, None);
    for field in fields {
        match field.strip_prefix("proc=") {
            Some(text) if proc.is_none() => proc = Some(parse_proc(text)?),
            None if handling.is_none() && proc.is_none() => match field {
                "hook" if reason.is_none() => handling = Some(Handling::Hook),
                "refused" if reason.is_none() => handling = Some(Handling::Refused),
                text if reason.is_none() && REASONS.contains(&text) => reason = Some(text),
                watch => handling = Some(parse_watch(watch)?),
            },
            _ => return None,
        }
    }
    CLASSES
        .contains(&class)
        .then_some(Symbol::Function(Function {
            name,
            class,
            handling,
            reason,
            proc,
        }))
}

fn parse_watch(text: &str) -> Option<Handling> {
    let arguments = match text.strip_prefix("watch")? {
        "" => REGISTER_ARGUMENTS,
        count => count.strip_prefix('=')?.parse().ok()?,
    };
    Some(Handling::Watch { arguments })
}

fn parse_proc(text: &str) -> Option<ProcAddress<'_>> {
    let (base, rest) = text.split_once('@')?;
    let (since, per_thread) = match rest.split_once('/') {
        Some((since, mode @ ("ptds" | "ptsz"))) => (since, Some(mode)),
        Some(_) => return None,
        None => (rest, None),
    };
    Some(ProcAddress {
        base,
        since: since.parse().ok()?,
        per_thread,
    })
}

/// Returns a symbol without the suffixes of its form: the name for `cuGetProcAddress`.
pub fn base_name(symbol: &str) -> &str {
    let plain = symbol
        .strip_suffix("_ptds")
        .or_else(|| symbol.strip_suffix("_ptsz"))
        .unwrap_or(symbol);
    match plain.rsplit_once("_v") {
        Some((base, version)) if version.parse::<u32>().is_ok() => base,
        _ => plain,
    }
}
