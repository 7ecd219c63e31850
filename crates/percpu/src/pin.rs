//! Keeps an object (a program or a shared library) that contains sequences loaded for ever.
//!
//! A thread's rseq area holds the address of the last sequence's descriptor until the kernel looks at it the next time. That can be
//! long after the sequence, and then the kernel kills the process if the descriptor is not mapped any more. Sequences are inlined,
//! with their descriptors, so that any object of the process can have some.
//!
//! ```text
//!   object A                                     this crate, perhaps in object B
//!   sequence │ descriptor     (many)
//!   constructor               (one, in .init_array) ── its own address ──► pin: find the object at that address; if it is not
//!                                                                          the program: dlopen(its name, NOLOAD | NODELETE)
//! ```
//!
//! * The assembly of each sequence also emits the constructor ([`constructor`]): a function in a COMDAT group and a word in
//!   `.init_array`. A translation unit has it once, for the assembler skips it if it is defined; the linker keeps one of all
//!   units'. Linkers keep `.init_array` when they drop unused sections. The name is hidden: each object calls its own.
//! * Constructors run before `dlopen` returns, under the dynamic linker's lock, which is recursive. So an object is pinned before
//!   any other thread can run its sequences, and before anything can unload it.
//! * The hot path pays nothing: there is no flag to check.
//! * The program is never unloaded: it needs no pin. A static program has no other objects, so it has no constructor.
//! * If the dynamic linker refuses, this process has no sequences ([`Why::NotPinned`](crate::Why::NotPinned)). If it has some
//!   already, because this crate is in another object than the sequences, the process ends: it would crash later, at any place.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU8, Ordering};

/// No object was refused so far.
const FINE: u8 = 0;
/// An object was refused, before there were sequences.
const REFUSED: u8 = 1;
/// There may be sequences: it is too late to refuse an object.
const DECIDED: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(FINE);

/// Whether all objects so far were pinned. Decides that there may be sequences, if so.
pub(crate) fn all_pinned() -> bool {
    STATE.compare_exchange(FINE, DECIDED, Ordering::Relaxed, Ordering::Relaxed) != Err(REFUSED)
}

/// The directives that put the constructor into the object, once. `{pin}` is [`pin`].
macro_rules! constructor {
    () => {
        concat!(
            ".ifndef __netmem_percpu_pin_this_object\n",
            ".pushsection .text.__netmem_percpu_pin_this_object, \"axG\", @progbits, __netmem_percpu_pin_this_object, comdat\n",
            ".weak __netmem_percpu_pin_this_object\n",
            ".hidden __netmem_percpu_pin_this_object\n",
            ".type __netmem_percpu_pin_this_object, @function\n",
            "__netmem_percpu_pin_this_object:\n",
            "lea rdi, [rip + __netmem_percpu_pin_this_object]\n",
            "jmp qword ptr [rip + {pin}@GOTPCREL]\n",
            ".popsection\n",
            ".pushsection .init_array, \"awG\", @init_array, __netmem_percpu_pin_this_object, comdat\n",
            ".balign 8\n",
            ".quad __netmem_percpu_pin_this_object\n",
            ".popsection\n",
            ".endif\n",
        )
    };
}
pub(crate) use constructor;

/// Pins the object at `address`. Called by that object's constructor.
pub(crate) extern "C" fn pin(address: *const c_void) {
    if pinned(address.addr()) {
        return;
    }
    if STATE.compare_exchange(FINE, REFUSED, Ordering::Relaxed, Ordering::Relaxed) == Err(DECIDED) {
        std::process::abort();
    }
}

/// What is looked for, and what was found.
struct Search {
    address: usize,
    name: *const c_char,
}

fn pinned(address: usize) -> bool {
    let mut search = Search { address, name: std::ptr::null() };
    // SAFETY: `is_at` gets the search, for the time of this call.
    unsafe { libc::dl_iterate_phdr(Some(is_at), (&raw mut search).cast()) };
    if search.name.is_null() {
        return false;
    }
    // SAFETY: a string of the dynamic linker's, which lives as long as the object; that is calling.
    if unsafe { CStr::from_ptr(search.name) }.is_empty() {
        // The program has no name.
        return true;
    }
    // SAFETY: loads nothing, and the object, which is being loaded, is found by the dynamic linker's own name for it.
    !unsafe { libc::dlopen(search.name, libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) }.is_null()
}

/// Ends the iteration at the object that has the address in one of its segments.
unsafe extern "C" fn is_at(object: *mut libc::dl_phdr_info, _size: usize, search: *mut c_void) -> c_int {
    // SAFETY: an object that is loaded, and its headers; `search` is the caller's.
    unsafe {
        let (object, search) = (&*object, &mut *search.cast::<Search>());
        let headers = std::slice::from_raw_parts(object.dlpi_phdr, usize::from(object.dlpi_phnum));
        let has = |header: &libc::Elf64_Phdr| {
            let start = (object.dlpi_addr as usize).wrapping_add(header.p_vaddr as usize);
            header.p_type == libc::PT_LOAD && search.address.wrapping_sub(start) < header.p_memsz as usize
        };
        let found = headers.iter().any(has);
        if found {
            search.name = object.dlpi_name;
        }
        c_int::from(found)
    }
}
