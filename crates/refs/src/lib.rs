//! Reference counts that scale.
