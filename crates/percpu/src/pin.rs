//! Keeps an object (a program or a shared library) that contains sequences loaded for ever.
//!
//! A thread's rseq area holds the address of the last sequence's descriptor until the kernel checks
//! it the next time. That can be long after the sequence, and then the kernel kills the process if
//! the descriptor is not mapped any more. Sequences are inlined, with their descriptors, so that
//! any object of the process can have some.
//!
//! ```text
//!   object A                                     this crate, perhaps in object B
//!   sequence │ descriptor     (many)
//!   word: where areas are     (one, 0 at first) ◄── written by pin and start
//!   constructor               (one, in .init_array) ── the word's address ──► pin: find the object at that address; if it is not
//!                                                                             the program: dlopen(its name, NOLOAD | NODELETE)
//! ```
//!
//! * The assembly of each sequence also emits the constructor ([`constructor`]): a function in a
//!   COMDAT group, a word in `.init_array`, and the object's words ([`Object`]). A translation unit
//!   has it once, for the assembler skips it if it is defined; the linker keeps one of all units'.
//!   Linkers keep `.init_array` when they drop unused sections. The names are hidden: each object
//!   calls its own, and its sequences load its own words.
//! * Constructors run before `dlopen` returns, under the dynamic linker's lock, which is recursive.
//!   So an object is pinned before any other thread can run its sequences, and before anything can
//!   unload it.
//! * The hot path pays nothing: a sequence loads from its object where a thread's area is. It needs
//!   that in any case, and 0 means that there are no sequences.
//! * The program is never unloaded: it needs no pin. A static program has no other objects, so it
//!   has no constructor.
//! * If the dynamic linker refuses, this process has no sequences
//!   ([`Why::NotPinned`](crate::Why::NotPinned)). If it has some already, because this crate is in
//!   another object than the sequences, the words of the object that was refused stay 0. To each of
//!   its sequences the gate is closed, and the caller uses the shared path. No thread's area ever
//!   holds one of its descriptors.
//!
//! ```text
//!   pin (an object is being loaded)              start (the mode is decided)
//!   OBJECTS = this object, linked to the others  STARTED = where areas are
//!   if STARTED: writes the object's word         writes the word of each object in OBJECTS
//! ```
//!
//! Both steps of each are sequentially consistent: pin sees what start has stored, or start sees
//! the object, or both.

use crate::mode::Index;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicIsize, AtomicPtr, AtomicU8, Ordering};

/// No object was refused so far.
const FINE: u8 = 0;
/// An object was refused, before there were sequences.
const REFUSED: u8 = 1;
/// There may be sequences: an object that is refused from now on has none of its own.
const DECIDED: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(FINE);

/// The words of an object, which the constructor's assembly defines. Where a thread's area is, in
/// bytes from the thread pointer, in a process that uses that index; 0 in others, and before the
/// mode is decided. Written once.
#[repr(C)]
pub(crate) struct Object {
    mm_cid: AtomicIsize,
    cpu_id: AtomicIsize,
    /// The object that was pinned before this one.
    next: AtomicPtr<Object>,
}

/// What a process that uses sequences has decided: see [`Object`].
static STARTED: [AtomicIsize; 2] = [AtomicIsize::new(0), AtomicIsize::new(0)];
/// The objects that are pinned. They are never unloaded.
static OBJECTS: AtomicPtr<Object> = AtomicPtr::new(ptr::null_mut());

impl Object {
    /// Lets the object's sequences run, if the process has any.
    fn enable(&self) {
        for (word, started) in [&self.mm_cid, &self.cpu_id].into_iter().zip(&STARTED) {
            let area = started.load(Ordering::SeqCst);
            if area != 0 {
                word.store(area, Ordering::Relaxed);
            }
        }
    }
}

/// Each thread has its area `area` bytes from its thread pointer: lets the sequences of all objects
/// that are pinned run.
pub(crate) fn start(area: isize, index: Index) {
    STARTED[usize::from(index == Index::CpuId)].store(area, Ordering::SeqCst);
    let mut at = OBJECTS.load(Ordering::SeqCst);
    // SAFETY: an object that is pinned stays loaded.
    while let Some(object) = unsafe { at.as_ref() } {
        object.enable();
        at = object.next.load(Ordering::Relaxed);
    }
}

/// Whether all objects so far were pinned. Decides that there may be sequences, if so.
pub(crate) fn all_pinned() -> bool {
    STATE.compare_exchange(FINE, DECIDED, Ordering::Relaxed, Ordering::Relaxed) != Err(REFUSED)
}

/// The directives that put the constructor and the [`Object`] into the object, once. `{pin}` is
/// [`pin`].
macro_rules! constructor {
    () => {
        concat!(
            ".ifndef __netmem_percpu_pin_this_object\n",
            ".pushsection .text.__netmem_percpu_pin_this_object, \"axG\", @progbits, __netmem_percpu_pin_this_object, comdat\n",
            ".weak __netmem_percpu_pin_this_object\n",
            ".hidden __netmem_percpu_pin_this_object\n",
            ".type __netmem_percpu_pin_this_object, @function\n",
            "__netmem_percpu_pin_this_object:\n",
            "lea rdi, [rip + __netmem_percpu_this_object]\n",
            "jmp qword ptr [rip + {pin}@GOTPCREL]\n",
            ".popsection\n",
            ".pushsection .init_array, \"awG\", @init_array, __netmem_percpu_pin_this_object, comdat\n",
            ".balign 8\n",
            ".quad __netmem_percpu_pin_this_object\n",
            ".popsection\n",
            ".pushsection .data.__netmem_percpu_this_object, \"awG\", @progbits, __netmem_percpu_pin_this_object, comdat\n",
            ".weak __netmem_percpu_this_object\n",
            ".hidden __netmem_percpu_this_object\n",
            ".type __netmem_percpu_this_object, @object\n",
            ".size __netmem_percpu_this_object, 24\n",
            ".balign 64\n",
            "__netmem_percpu_this_object:\n",
            ".quad 0, 0, 0\n",
            ".balign 64\n",
            ".popsection\n",
            ".endif\n",
        )
    };
}
pub(crate) use constructor;
const _: () = assert!(size_of::<Object>() == 24);

/// Where areas are by `mm_cid`, as the object knows that this is inlined into. Inlined always: each
/// sequence begins with it.
#[inline(always)]
#[allow(named_asm_labels, reason = "the constructor has a name, so that the assembler and the linker keep one of many")]
pub(crate) fn by_mm_cid() -> isize {
    let area;
    // SAFETY: loads a word that is this object's, and always there.
    unsafe {
        std::arch::asm!(
            constructor!(),
            "mov {area}, qword ptr [rip + __netmem_percpu_this_object]",
            area = out(reg) area,
            pin = sym pin,
            options(nostack, preserves_flags, pure, readonly),
        );
    }
    area
}

/// The same by `cpu_id`.
#[inline(always)]
#[allow(named_asm_labels, reason = "as above")]
pub(crate) fn by_cpu_id() -> isize {
    let area;
    // SAFETY: as above.
    unsafe {
        std::arch::asm!(
            constructor!(),
            "mov {area}, qword ptr [rip + __netmem_percpu_this_object + 8]",
            area = out(reg) area,
            pin = sym pin,
            options(nostack, preserves_flags, pure, readonly),
        );
    }
    area
}

/// Pins the object whose words these are. Called by that object's constructor.
///
/// # Safety
///
/// The words are the object's own, or stay for ever.
pub(crate) unsafe extern "C" fn pin(object: *mut Object) {
    if !pinned(object.addr()) {
        let _ = STATE.compare_exchange(FINE, REFUSED, Ordering::Relaxed, Ordering::Relaxed);
        return;
    }
    // SAFETY: the caller's, and the object stays loaded now.
    let words = unsafe { &*object };
    let link = |first| {
        words.next.store(first, Ordering::Relaxed);
        Some(object)
    };
    // The closure never refuses.
    let _ = OBJECTS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, link);
    words.enable();
}

/// The address that is searched for, and the object that was found.
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
    // SAFETY: loads nothing, and the object, which is being loaded, is found by the dynamic
    // linker's own name for it.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decision::mode;
    use crate::mode::Mode;

    fn words() -> &'static Object {
        Box::leak(Box::new(Object {
            mm_cid: AtomicIsize::new(0),
            cpu_id: AtomicIsize::new(0),
            next: AtomicPtr::new(ptr::null_mut()),
        }))
    }

    fn areas(object: &Object) -> [isize; 2] {
        [&object.mm_cid, &object.cpu_id].map(|word| word.load(Ordering::Relaxed))
    }

    /// An object that is refused when there are sequences already has none of its own, and the
    /// process goes on.
    #[test]
    fn a_late_object_that_is_refused_has_no_sequences() {
        let mode = mode();
        // No object is at an address of the heap: the dynamic linker cannot keep it.
        let refused = words();
        // SAFETY: they stay for ever.
        unsafe { pin(std::ptr::from_ref(refused).cast_mut()) };
        assert_eq!(areas(refused), [0, 0]);
        // This program was pinned before the decision.
        let here = [by_mm_cid(), by_cpu_id()];
        assert_eq!(
            here.map(|area| area != 0),
            match mode {
                Mode::Rseq(Index::MmCid) => [true, false],
                Mode::Rseq(Index::CpuId) => [false, true],
                Mode::Portable(_) => [false, false],
            }
        );
        // An object that is pinned after it.
        static LATE: Object =
            Object { mm_cid: AtomicIsize::new(0), cpu_id: AtomicIsize::new(0), next: AtomicPtr::new(ptr::null_mut()) };
        // SAFETY: as above.
        unsafe { pin((&raw const LATE).cast_mut()) };
        assert_eq!(areas(&LATE), here);
    }
}
