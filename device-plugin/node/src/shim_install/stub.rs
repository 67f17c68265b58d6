//! Builds a library without code that loads another one under a second SONAME.
//!
//! A loader that has a library with the SONAME `libcuda.so.1` opens no other file for that name.
//! Many programs ask for `libcuda.so`, and a library has one SONAME only. The stub has this SONAME
//! and a `DT_NEEDED` entry for the shim. Once the stub is loaded, `dlopen("libcuda.so")` returns
//! the stub whatever the library path is, and `dlsym` continues to the shim.

use object::elf::{self, Dyn64, FileHeader64, Ident, ProgramHeader64, Sym64};
use object::{LittleEndian, U16, U32, U64, pod};

const LITTLE: LittleEndian = LittleEndian;

/// The largest page size of the supported machines: arm64 kernels may use 64 KiB.
const PAGE: u64 = 0x1_0000;

#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = elf::EM_X86_64;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = elf::EM_AARCH64;

const HEADER: u64 = size_of::<FileHeader64<LittleEndian>>() as u64;
const SEGMENT: u64 = size_of::<ProgramHeader64<LittleEndian>>() as u64;
const DYNAMIC_ENTRY: u64 = size_of::<Dyn64<LittleEndian>>() as u64;
const SYMBOL: u64 = size_of::<Sym64<LittleEndian>>() as u64;

/// Builds an ELF library with the SONAME `soname` that needs `needed` and has no symbol.
///
/// Format: System V gABI, "Dynamic Linking". The file's parts, at equal addresses in memory: the
/// header, three segments, the dynamic section, the empty symbol table, its hash table, the names.
pub(super) fn build_stub(soname: &str, needed: &str) -> Vec<u8> {
    // The string table begins with the empty name.
    let names = format!("\0{needed}\0{soname}\0");
    // One bucket and one symbol; both chains end at once.
    let hash = [1_u32, 1, 0, 0].map(|word| U32::new(LITTLE, word));

    let dynamic_at = HEADER + 3 * SEGMENT;
    let symbols_at = dynamic_at + 8 * DYNAMIC_ENTRY;
    let hash_at = symbols_at + SYMBOL;
    let names_at = hash_at + size_of_val(&hash) as u64;
    let end = names_at + names.len() as u64;
    let soname_at = 1 + needed.len() as u64 + 1;

    let dynamic = [
        (elf::DT_NEEDED, 1),
        (elf::DT_SONAME, soname_at),
        (elf::DT_HASH, hash_at),
        (elf::DT_STRTAB, names_at),
        (elf::DT_SYMTAB, symbols_at),
        (elf::DT_STRSZ, names.len() as u64),
        (elf::DT_SYMENT, SYMBOL),
        (elf::DT_NULL, 0),
    ]
    .map(|(tag, value)| dynamic_entry(tag, value));
    let segments = [
        // Writable: loaders before glibc 2.35 write addresses into the dynamic section itself.
        program_header(elf::PT_LOAD, 0, end, PAGE),
        program_header(elf::PT_DYNAMIC, dynamic_at, symbols_at - dynamic_at, 8),
        // Without this segment the loader would make the program's stack executable.
        program_header(elf::PT_GNU_STACK, 0, 0, 16),
    ];

    let mut file = Vec::new();
    file.extend(pod::bytes_of(&header(segments.len())));
    file.extend(pod::bytes_of_slice(&segments));
    file.extend(pod::bytes_of_slice(&dynamic));
    file.extend(pod::bytes_of(&Sym64::<LittleEndian>::default()));
    file.extend(pod::bytes_of_slice(&hash));
    file.extend(names.as_bytes());
    file
}

fn header(segments: usize) -> FileHeader64<LittleEndian> {
    let short = |value: u64| U16::new(LITTLE, value as u16);
    FileHeader64 {
        e_ident: Ident {
            magic: elf::ELFMAG,
            class: elf::ELFCLASS64,
            data: elf::ELFDATA2LSB,
            version: elf::EV_CURRENT,
            os_abi: elf::ELFOSABI_SYSV,
            abi_version: 0,
            padding: [0; 7],
        },
        e_type: U16::new(LITTLE, elf::ET_DYN),
        e_machine: U16::new(LITTLE, MACHINE),
        e_version: U32::new(LITTLE, elf::EV_CURRENT.into()),
        e_entry: U64::default(),
        e_phoff: U64::new(LITTLE, HEADER),
        e_shoff: U64::default(),
        e_flags: U32::default(),
        e_ehsize: short(HEADER),
        e_phentsize: short(SEGMENT),
        e_phnum: short(segments as u64),
        e_shentsize: short(0),
        e_shnum: short(0),
        e_shstrndx: short(0),
    }
}

fn program_header(kind: u32, at: u64, size: u64, align: u64) -> ProgramHeader64<LittleEndian> {
    let [at, size, align] = [at, size, align].map(|value| U64::new(LITTLE, value));
    ProgramHeader64 {
        p_type: U32::new(LITTLE, kind),
        p_flags: U32::new(LITTLE, elf::PF_R | elf::PF_W),
        p_offset: at,
        p_vaddr: at,
        p_paddr: at,
        p_filesz: size,
        p_memsz: size,
        p_align: align,
    }
}

fn dynamic_entry(tag: i64, value: u64) -> Dyn64<LittleEndian> {
    Dyn64 {
        d_tag: object::I64::new(LITTLE, tag),
        d_val: U64::new(LITTLE, value),
    }
}
