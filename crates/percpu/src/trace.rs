//! The events of `tracing`, for this package and the packages above it.
//!
//! Why here: whether events exist is decided by one feature, `tracing`, of the package below all
//! others. Without it, the crate `tracing` is not in a program's tree, and an event compiles to
//! nothing; its fields and its text are still checked.

#[cfg(feature = "tracing")]
pub use tracing::{debug, error, info, warn};

/// An event that is not reported: the fields of `tracing`'s macros, and then the text.
#[cfg(not(feature = "tracing"))]
#[doc(hidden)]
#[macro_export]
macro_rules! no_event {
    ($text:literal $($rest:tt)*) => { if false { let _ = format_args!($text $($rest)*); } };
    ($name:ident = % $value:expr, $($rest:tt)+) => {{ $crate::no_event!(@ $value); $crate::no_event!($($rest)+) }};
    ($name:ident = ? $value:expr, $($rest:tt)+) => {{ $crate::no_event!(@ $value); $crate::no_event!($($rest)+) }};
    ($name:ident = $value:expr, $($rest:tt)+) => {{ $crate::no_event!(@ $value); $crate::no_event!($($rest)+) }};
    (% $value:ident, $($rest:tt)+) => {{ $crate::no_event!(@ $value); $crate::no_event!($($rest)+) }};
    (? $value:ident, $($rest:tt)+) => {{ $crate::no_event!(@ $value); $crate::no_event!($($rest)+) }};
    ($value:ident, $($rest:tt)+) => {{ $crate::no_event!(@ $value); $crate::no_event!($($rest)+) }};
    (@ $value:expr) => { if false { let _ = &$value; } };
}

#[cfg(not(feature = "tracing"))]
pub use {no_event as debug, no_event as error, no_event as info, no_event as warn};
