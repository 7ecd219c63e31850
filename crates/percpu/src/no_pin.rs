//! Stands in for the pin where no object with sequences is ever unloaded: in a static program, with a C library that unloads
//! nothing or registers no areas, and where there are no sequences.

pub(crate) fn all_pinned() -> bool {
    true
}

/// No constructor: a comment that has the operand in it, for an operand has to be used.
#[allow(unused_macros, reason = "where there are no sequences")]
macro_rules! constructor {
    () => {
        "/* {pin} */"
    };
}
#[allow(unused_imports, reason = "as above")]
pub(crate) use constructor;

#[allow(dead_code, reason = "as above")]
pub(crate) extern "C" fn pin() {}
