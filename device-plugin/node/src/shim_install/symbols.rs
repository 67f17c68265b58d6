//! Lists the symbols that a library exports, and hides some of them in a copy.
//!
//! A symbol that the node's driver lacks must not be found in the shim either. Programs take a
//! symbol that `dlsym` finds for a feature of the driver.
//!
//! A hidden symbol becomes an undefined weak one, which no loader finds and every linker accepts
//! (System V gABI, "Symbol Table"). The loaders of glibc and musl would ignore a local symbol too,
//! but linkers refuse local symbols among global ones.

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

/// The names of the functions and variables that a library exports.
///
/// # Errors
/// The file cannot be read, or is no little-endian 64-bit ELF file.
pub(super) fn exported_names(library: &Path) -> io::Result<BTreeSet<Vec<u8>>> {
    // A driver library has 90 MB, of which only the symbol table is read.
    let file = ReadCache::new(File::open(library)?);
    let (symbols, _) = dynamic_symbols(&file)?;
    let defined = symbols.iter().filter(|symbol| is_exported(symbol));
    Ok(defined
        .filter_map(|symbol| symbol.name(LITTLE, symbols.strings()).ok())
        .map(<[u8]>::to_vec)
        .collect())
}

/// Hides every exported symbol of `library` whose name is not in `exported`.
///
/// # Errors
/// The library is no little-endian 64-bit ELF file.
pub(super) fn hide_names(library: &mut [u8], exported: &BTreeSet<Vec<u8>>) -> io::Result<()> {
    let (symbols, offset) = dynamic_symbols(&*library)?;
    let is_missing = |symbol: &Symbol| {
        let name = symbol.name(LITTLE, symbols.strings());
        is_exported(symbol) && name.is_ok_and(|name| !exported.contains(name))
    };
    let hidden: Vec<bool> = symbols.iter().map(is_missing).collect();
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

/// The dynamic symbol table and its offset in the file.
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
