//! What the stacks of a host share: routes, neighbours, ports, and the way from stack to stack.

pub(crate) mod directory;
pub(crate) mod host;
pub(crate) mod mailbox;
pub(crate) mod notifier;
pub(crate) mod outbox;
pub(crate) mod saved;
