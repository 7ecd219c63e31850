//! What the libraries log.

use std::fmt::Debug;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// A log subscriber that calls a function with each event of this level and of more severe ones.
pub fn on_event(level: Level, call: impl Fn(&Event<'_>) + Send + Sync + 'static) -> impl Subscriber + Send + Sync {
    OnEvent(level, call)
}

struct OnEvent<F>(Level, F);

impl<F: Fn(&Event<'_>) + 'static> Subscriber for OnEvent<F> {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.0
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        (self.1)(event);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The names and the values of an event's fields.
pub fn fields(event: &Event<'_>) -> Vec<(&'static str, String)> {
    struct Fields(Vec<(&'static str, String)>);

    impl Visit for Fields {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            self.0.push((field.name(), format!("{value:?}")));
        }
    }

    let mut fields = Fields(Vec::new());
    event.record(&mut fields);
    fields.0
}
