//! The names that a library exports, and a copy of a library that exports fewer.
//!
//! A name that the node's driver lacks must not be found in the shim either: programs take what `dlsym` finds for
//! what the driver can do. A hidden symbol becomes an undefined weak one, which no loader finds and no linker minds
//! (System V gABI, "Symbol Table"; glibc and musl ignore a local one too, but linkers refuse locals among globals).

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::Path;

use object::elf::{self, FileHeader64, Sym64};
use object::read::elf::{FileHeader, SectionHeader, Sym, SymbolTable};
use object::{LittleEndian, ReadCache, ReadRef, pod};

const LITTLE: LittleEndian = LittleEndian;

type Header = FileHeader64<LittleEndian>;
type Symbol = Sym64<LittleEndian>;

/// The names of the library's exported functions and variables.
///
/// # Errors
/// It cannot be read, or is no little-endian 64-bit ELF file.
pub(super) fn exported_names(library: &Path) -> io::Result<BTreeSet<Vec<u8>>> {
    // A driver's library has 90 MB; its table of symbols is all that is read.
    let file = ReadCache::new(File::open(library)?);
    let (symbols, _) = dynamic_symbols(&file)?;
    let defined = symbols.iter().filter(|symbol| is_exported(symbol));
    Ok(defined
        .filter_map(|symbol| symbol.name(LITTLE, symbols.strings()).ok())
        .map(<[u8]>::to_vec)
        .collect())
}

/// Hides every name that `library` exports and `kept` lacks.
///
/// # Errors
/// It is no little-endian 64-bit ELF file.
pub(super) fn hide_names(library: &mut [u8], kept: &BTreeSet<Vec<u8>>) -> io::Result<()> {
    let (symbols, offset) = dynamic_symbols(&*library)?;
    let lacking = |symbol: &Symbol| {
        let name = symbol.name(LITTLE, symbols.strings());
        is_exported(symbol) && name.is_ok_and(|name| !kept.contains(name))
    };
    let hidden: Vec<bool> = symbols.iter().map(lacking).collect();
    let outside = || io::Error::from(io::ErrorKind::UnexpectedEof);
    let bytes = library.get_mut(offset..).ok_or_else(outside)?;
    let (table, _) =
        pod::slice_from_bytes_mut::<Symbol>(bytes, hidden.len()).map_err(|()| outside())?;
    for (symbol, _) in table.iter_mut().zip(hidden).filter(|(_, hidden)| *hidden) {
        *symbol = Symbol {
            st_name: symbol.st_name,
            st_info: elf::STB_WEAK << 4 | elf::STT_NOTYPE,
            st_other: elf::STV_DEFAULT,
            ..Symbol::default()
        };
    }
    Ok(())
}

/// The table of dynamic symbols, and where it begins in the file.
fn dynamic_symbols<'a, R: ReadRef<'a>>(
    library: R,
) -> io::Result<(SymbolTable<'a, Header, R>, usize)> {
    let found = Header::parse(library).and_then(|header| {
        let sections = header.sections(LITTLE, library)?;
        let symbols = sections.symbols(LITTLE, library, elf::SHT_DYNSYM)?;
        Ok((
            symbols,
            sections.section(symbols.section())?.sh_offset(LITTLE),
        ))
    });
    let (symbols, offset) = found.map_err(io::Error::other)?;
    Ok((symbols, usize::try_from(offset).map_err(io::Error::other)?))
}

fn is_exported(symbol: &Symbol) -> bool {
    symbol.st_bind() != elf::STB_LOCAL && !symbol.is_undefined(LITTLE)
}
