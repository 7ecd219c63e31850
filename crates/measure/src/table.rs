//! Tables without lines, for reports as text.

use comfy_table::{CellAlignment, Table, presets};

/// A table of rows of text. The columns for which `is_number` is true are aligned to the right.
pub fn table(
    head: &[impl AsRef<str>],
    rows: impl IntoIterator<Item = Vec<String>>,
    is_number: impl Fn(usize) -> bool,
) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(head.iter().map(AsRef::as_ref));
    table.add_rows(rows);
    for (n, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 1));
        if is_number(n) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.to_string()
}
