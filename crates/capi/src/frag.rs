//! Fragments: counted bytes of a page, by value.

use crate::region::Kept;
use crate::status::{Failure, netmem_status, status};
use netmem_pool::{Bulk, Frag, Memory, PeerShared, Region, foreign};
use std::ffi::c_void;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ptr::NonNull;

/// A holder of some bytes of a page, 16 bytes large. The variable owns it: move it by copying and
/// forgetting the source. All zeros is an empty one. Its fields belong to the library.
#[repr(C)]
#[derive(Debug)]
pub struct netmem_frag {
    /// null if there is nothing
    pub private_page: *mut c_void,
    /// of the library
    pub private_span: u64,
}

const _: () = {
    assert!(align_of::<netmem_frag>() >= align_of::<Frag<Kept>>());
    assert!(size_of::<netmem_frag>() == size_of::<Frag<Kept>>());
    assert!(size_of::<netmem_frag>() == size_of::<Option<Frag<Kept>>>());
    // SAFETY: as large, and of bytes that may have no value.
    let none: [MaybeUninit<usize>; 2] = unsafe { std::mem::transmute(None::<Frag<Kept>>) };
    // SAFETY: what tells `None` from a fragment is the pointer that is not null, the first field.
    assert!(unsafe { none[0].assume_init() } == 0);
};

impl netmem_frag {
    pub(crate) const EMPTY: Self = Self { private_page: std::ptr::null_mut(), private_span: 0 };

    /// A fragment of any kind of memory that this process has mapped. What C's functions do with it
    /// is right for all kinds: they count, narrow, release, and pass on the address. None of them
    /// makes a slice. A queue takes it out as one of its own kind, if the page is of the queue's
    /// region.
    #[inline]
    pub(crate) fn of<M: Memory>(frag: Frag<M>) -> Self {
        const { assert!(M::MAPPED && size_of::<Frag<M>>() == size_of::<Self>()) }
        let frag = ManuallyDrop::new(frag);
        // SAFETY: a fragment is a pointer that is not null and a word (both are `repr(C)`),
        // whatever its kind; the sizes are compared above.
        unsafe { std::mem::transmute_copy(&frag) }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.private_page.is_null()
    }

    /// The fragment that the variable owns, if there is one; the variable is empty then.
    ///
    /// # Safety
    ///
    /// Empty, or from [`of`](Self::of) and released by no copy of it.
    #[inline]
    pub(crate) unsafe fn take(&mut self) -> Option<Frag<Kept>> {
        // SAFETY: as the caller promises; of another kind, it is not read.
        unsafe { self.take_of() }
    }

    /// The same of another kind of memory.
    ///
    /// # Safety
    ///
    /// As for [`take`](Self::take). Before anything reads or writes the bytes, the page is found to
    /// be of a region of this kind.
    #[inline]
    pub(crate) unsafe fn take_of<M: Memory>(&mut self) -> Option<Frag<M>> {
        const { assert!(size_of::<Frag<M>>() == size_of::<Self>()) }
        let this = std::mem::replace(self, Self::EMPTY);
        // SAFETY: it is not empty, so it is from `of`; the variable has forgotten it.
        (!this.private_page.is_null()).then(|| unsafe { std::mem::transmute_copy(&this) })
    }

    /// Whether the page is of this region; not if it is empty.
    #[inline]
    pub(crate) fn is_of<M: Memory>(&self, region: &Region<M>) -> bool {
        // SAFETY: it is not empty, so it is from `of`. The region compares addresses.
        !self.private_page.is_null()
            && region.index_of(unsafe { &*std::ptr::from_ref(self).cast::<Frag<M>>() }).is_some()
    }

    /// Its bytes; 0 if it is empty.
    pub(crate) fn length(&self) -> usize {
        self.as_frag().map_or(0, Frag::len)
    }

    /// Appends the bytes, of any kind of memory: another process may be changing them.
    ///
    /// # Safety
    ///
    /// As for [`take`](Self::take).
    pub(crate) unsafe fn append_to(&self, to: &mut Vec<u8>) {
        let at = to.len();
        to.resize(at + self.length(), 0);
        if !self.is_empty() {
            // SAFETY: it is not empty, so it is from `of`. Of this kind, bytes are only copied.
            let frag = unsafe { &*std::ptr::from_ref(self).cast::<Frag<PeerShared>>() };
            // It has as many bytes.
            let _ = frag.copy_to(0, &mut to[at..]);
        }
    }

    /// # Safety
    ///
    /// As for [`take`](Self::take).
    #[inline]
    fn as_frag(&self) -> Option<&Frag<Kept>> {
        // SAFETY: as in `take`; the alignment is compared above.
        (!self.private_page.is_null()).then(|| unsafe { &*std::ptr::from_ref(self).cast() })
    }

    fn as_frag_mut(&mut self) -> Option<&mut Frag<Kept>> {
        // SAFETY: as in `take`; the alignment is compared above.
        (!self.private_page.is_null()).then(|| unsafe { &mut *std::ptr::from_mut(self).cast() })
    }
}

/// # Safety
///
/// Null, or a fragment of the header.
#[inline]
pub(crate) unsafe fn get<'a>(frag: *const netmem_frag) -> Result<&'a Frag<Kept>, Failure> {
    // SAFETY: as the caller promises.
    unsafe { frag.as_ref() }.ok_or_else(|| Failure::null("frag"))?.as_frag().ok_or_else(Failure::empty)
}

/// # Safety
///
/// As for [`get`], and nothing else uses the variable.
unsafe fn get_mut<'a>(frag: *mut netmem_frag) -> Result<&'a mut Frag<Kept>, Failure> {
    // SAFETY: as the caller promises.
    unsafe { frag.as_mut() }.ok_or_else(|| Failure::null("frag"))?.as_frag_mut().ok_or_else(Failure::empty)
}

/// Room for results, of which the caller promises `n`.
///
/// # Safety
///
/// Null, or room for `n` fragments, which nothing else uses during `'a`.
#[inline]
pub(crate) unsafe fn room<'a>(
    frags: *mut netmem_frag,
    n: usize,
) -> Result<&'a mut [MaybeUninit<netmem_frag>], Failure> {
    match NonNull::new(frags) {
        // SAFETY: as the caller promises.
        Some(at) => Ok(unsafe { std::slice::from_raw_parts_mut(at.as_ptr().cast(), n) }),
        None if n == 0 => Ok(&mut []),
        None => Err(Failure::Null("frags")),
    }
}

/// Room for results as room for optional fragments: what is written there is a variable of the
/// header.
///
/// # Safety
///
/// Room for `n` fragments, which nothing else uses during `'a`.
#[inline]
pub(crate) unsafe fn results<'a>(frags: *mut netmem_frag, n: usize) -> &'a mut [MaybeUninit<Option<Frag<Kept>>>] {
    // SAFETY: as the caller promises. A variable is an optional fragment, with the same size and no
    // smaller alignment, and `None` has the null pointer of an empty one: see the assertions above.
    unsafe { std::slice::from_raw_parts_mut(frags.cast(), n) }
}

/// Variables of the header as optional fragments of a kind of memory.
///
/// # Safety
///
/// `n` fragments of the header, which nothing else uses during `'a`. A fragment is only released,
/// and only after its page was found to be of a pool of this kind.
#[inline]
pub(crate) unsafe fn variables<'a, M: Memory>(frags: *mut netmem_frag, n: usize) -> &'a mut [Option<Frag<M>>] {
    const { assert!(size_of::<Option<Frag<M>>>() == size_of::<netmem_frag>()) }
    const { assert!(align_of::<netmem_frag>() >= align_of::<Option<Frag<M>>>()) }
    // SAFETY: as the caller promises. That a variable is an optional fragment is compared above.
    unsafe { std::slice::from_raw_parts_mut(frags.cast(), n) }
}

/// Releases those of `n` fragments that are of `region`, and empties their variables. Returns
/// whether there are others.
///
/// For a queue of the region, in its poll context: its handle keeps the region. The last page of
/// another region may be among the others. Its release calls a function of the program, which may
/// use the same handle, so it must not happen while the queue is borrowed.
///
/// # Safety
///
/// Null with `n` of 0, or fragments of the header, which nothing else uses.
pub(crate) unsafe fn release_of<M: Memory>(region: &Region<M>, frags: *mut netmem_frag, n: usize) -> bool {
    let mut others = false;
    for i in 0..n {
        // SAFETY: as the caller promises.
        let frag = unsafe { &mut *frags.add(i) };
        if !frag.is_empty() && !frag.is_of(region) {
            others = true;
        } else {
            // SAFETY: as the caller promises.
            drop(unsafe { frag.take() });
        }
    }
    others
}

/// Releases `n` fragments, and empties the variables. The variables are not borrowed while a
/// function of the program runs, which releases foreign memory.
///
/// # Safety
///
/// As for [`release_of`]. No queue or pool is borrowed.
pub(crate) unsafe fn release_all(frags: *mut netmem_frag, n: usize) {
    let mut bulk = Bulk::new();
    for i in 0..n {
        // SAFETY: as the caller promises.
        if let Some(frag) = unsafe { (*frags.add(i)).take() } {
            bulk.add(frag);
        }
    }
}

/// Where the bytes are; null if the fragment is empty. Valid until it is released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_frag_data(frag: *const netmem_frag) -> *const c_void {
    // SAFETY: as the header says.
    unsafe { get(frag) }.map_or(std::ptr::null(), |frag| frag.as_ptr().cast())
}

/// Where the bytes are, for writing; null if the fragment is empty, or has another holder. Nothing
/// may share the fragment, or split it, while the bytes are written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_frag_data_mut(frag: *mut netmem_frag) -> *mut c_void {
    // SAFETY: as the header says.
    match unsafe { get(frag) } {
        Ok(frag) if frag.is_writable() => frag.as_ptr().cast_mut().cast(),
        _ => std::ptr::null_mut(),
    }
}

/// Its bytes; 0 if it is empty.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_frag_length(frag: *const netmem_frag) -> usize {
    // SAFETY: as the header says.
    unsafe { get(frag) }.map_or(0, Frag::len)
}

/// Whether this variable is the page's only holder, so that its bytes can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_frag_is_writable(frag: *const netmem_frag) -> bool {
    // SAFETY: as the header says.
    unsafe { get(frag) }.is_ok_and(Frag::is_writable)
}

/// The page's number in its region; -1 if the fragment is empty.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_frag_page_index(frag: *const netmem_frag) -> i64 {
    // SAFETY: as the header says.
    unsafe { get(frag) }.map_or(-1, |frag| frag.index().into())
}

/// Copies `length` bytes to `offset` of the fragment. The bytes must not be the fragment's own:
/// move those with memmove and netmem_frag_data_mut.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT (empty), NETMEM_ERR_RANGE, NETMEM_ERR_SHARED.
/// Nothing is written then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_frag_write(
    frag: *mut netmem_frag,
    offset: usize,
    from: *const c_void,
    length: usize,
) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let frag = unsafe { get_mut(frag) }?;
        let have = frag.len();
        if offset > have || length > have - offset {
            return Err(Failure::Range { offset, len: length, have });
        }
        if !frag.is_writable() {
            return Err(Failure::Shared);
        }
        if from.is_null() && length > 0 {
            return Err(Failure::Null("from"));
        }
        // SAFETY: the range is in the page, whose only holder in this process is this value, and the
        // caller has as many bytes. Another process may have the memory of both. A caller that
        // passes the fragment's own bytes in spite of the header reads wrong bytes, no more.
        unsafe { foreign::copy_across(from.cast(), frag.as_ptr().cast_mut().add(offset), length) };
        Ok(())
    })
}

/// Makes another holder of `length` bytes at `offset`. One atomic addition. `out` is not read, and
/// must not be `frag`.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT (empty, or `out` is `frag`), NETMEM_ERR_RANGE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_frag_share(
    frag: *const netmem_frag,
    offset: usize,
    length: usize,
    out: *mut netmem_frag,
) -> netmem_status {
    status(|| {
        apart(frag, out)?;
        // SAFETY: as the header says.
        let frag = unsafe { get(frag) }?;
        let have = frag.len();
        if offset > have || length > have - offset {
            return Err(Failure::Range { offset, len: length, have });
        }
        // SAFETY: the caller has room for a fragment there.
        unsafe { out.write(netmem_frag::of(frag.slice(offset..offset + length))) };
        Ok(())
    })
}

/// Cuts a fragment in two: `frag` keeps the first `at` bytes, `out` gets the rest. One atomic
/// addition. `out` is not read, and must not be `frag`.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT (empty, or `out` is `frag`), NETMEM_ERR_RANGE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_frag_split(frag: *mut netmem_frag, at: usize, out: *mut netmem_frag) -> netmem_status {
    status(|| {
        apart(frag, out)?;
        // SAFETY: as the header says.
        let frag = unsafe { get_mut(frag) }?;
        if at > frag.len() {
            return Err(Failure::Range { offset: at, len: 0, have: frag.len() });
        }
        let rest = frag.split_off(at);
        // SAFETY: the caller has room for a fragment there.
        unsafe { out.write(netmem_frag::of(rest)) };
        Ok(())
    })
}

fn apart(frag: *const netmem_frag, out: *mut netmem_frag) -> Result<(), Failure> {
    if out.is_null() {
        return Err(Failure::Null("out"));
    }
    if std::ptr::eq(frag, out) {
        return Err(Failure::Argument("out is frag: it would be lost".into()));
    }
    Ok(())
}

/// Removes `n` bytes from the front. No atomic.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT (empty), NETMEM_ERR_RANGE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_frag_advance(frag: *mut netmem_frag, n: usize) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let frag = unsafe { get_mut(frag) }?;
        if n > frag.len() {
            return Err(Failure::Range { offset: n, len: 0, have: frag.len() });
        }
        frag.advance(n);
        Ok(())
    })
}

/// Shortens the fragment to its first `length` bytes. No atomic.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT (empty), NETMEM_ERR_RANGE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_frag_truncate(frag: *mut netmem_frag, length: usize) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let frag = unsafe { get_mut(frag) }?;
        if length > frag.len() {
            return Err(Failure::Range { offset: length, len: 0, have: frag.len() });
        }
        frag.truncate(length);
        Ok(())
    })
}

/// Releases a fragment, on any thread, and empties the variable. The last holder's release returns
/// the page to its pool. An empty one is ignored, and so is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_frag_release(frag: *mut netmem_frag) {
    // A page's return can panic in no code of this library; the status is for what cannot be known.
    status(|| {
        if !frag.is_null() {
            // SAFETY: as the header says.
            drop(unsafe { (*frag).take() });
        }
        Ok(())
    });
}

/// Releases `n` fragments, on any thread, and empties the variables. Pages of one pool return
/// together: cheaper than one by one. Empty ones are ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_frags_release(frags: *mut netmem_frag, n: usize) {
    status(|| {
        if !frags.is_null() {
            // SAFETY: as the header says.
            unsafe { release_all(frags, n) };
        }
        Ok(())
    });
}
