//! An assembler for the instructions that the programs of this crate use.
//!
//! An instruction is a word of 64 bits: the operation, two registers, an offset and a constant.
//! Each method here makes one valid instruction, and jumps go to labels. The kernel's verifier
//! checks the whole program.

/// A register. R1 contains the context at the start, and R0 the result at the end. A call
/// overwrites R0 to R5. R10 is the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reg {
    R0,
    R1,
    R2,
    R3,
    R4,
    R5,
    R6,
    R7,
    R8,
    R9,
    /// The end of the stack.
    R10,
}

/// The number of bytes of a load or store. A load fills the rest of the register with zeros.
#[derive(Clone, Copy, Debug)]
pub(super) enum Width {
    Word = 0x00,
    Half = 0x08,
    Byte = 0x10,
    Double = 0x18,
}

/// The condition of a jump, with the register on the left and the operand on the right.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cond {
    Equal = 0x10,
    Above = 0x20,
    AnyBit = 0x40,
    NotEqual = 0x50,
    Below = 0xa0,
}

/// A function of the kernel.
#[derive(Clone, Copy, Debug)]
pub(super) enum Helper {
    /// Redirects the frame to the entry of a map. The arguments are the map, the key, and the
    /// result if there is no such entry.
    RedirectMap = 51,
    /// Moves the beginning of the metadata in front of the frame. The arguments are the context and
    /// the distance. The result is 0, or an error.
    AdjustMeta = 54,
}

const CLASS_LOAD_CONSTANT: u8 = 0x00;
const CLASS_LOAD: u8 = 0x01;
const CLASS_STORE_CONSTANT: u8 = 0x02;
const CLASS_STORE: u8 = 0x03;
const CLASS_JUMP: u8 = 0x05;
const CLASS_JUMP_32: u8 = 0x06;
const CLASS_ALU: u8 = 0x07;
/// The address is the sum of a register and an offset.
const MODE_MEMORY: u8 = 0x60;
/// The operand is a register. Without this bit, it is the constant.
const FROM_REGISTER: u8 = 0x08;
const DOUBLE_WORD: u8 = 0x18;
/// The constant of a double word is the descriptor of a map.
const PSEUDO_MAP: u8 = 1;
/// The constant of a call is the number of a function in the kernel's BTF.
const PSEUDO_KERNEL_FUNCTION: u8 = 2;

const ADD: u8 = 0x00;
const OR: u8 = 0x40;
const AND: u8 = 0x50;
const SHIFT_LEFT: u8 = 0x60;
const SHIFT_RIGHT: u8 = 0x70;
const MOVE: u8 = 0xb0;
const CALL: u8 = 0x80;
const EXIT: u8 = 0x90;

/// A place in a program that is the target of jumps. Jumps only go forward, so every program ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Label(usize);

/// A program that is being assembled.
#[derive(Debug, Default)]
pub(super) struct Asm {
    code: Vec<u64>,
    /// The position of each label, after it was placed.
    labels: Vec<Option<usize>>,
    /// Jumps whose offset is not yet written.
    jumps: Vec<(usize, Label)>,
}

impl Asm {
    fn emit(&mut self, op: u8, dst: u8, src: u8, offset: i16, constant: i32) -> &mut Self {
        let low = u64::from(op) | u64::from(dst | src << 4) << 8 | u64::from(offset as u16) << 16;
        self.code.push(low | u64::from(constant as u32) << 32);
        self
    }

    fn alu(&mut self, op: u8, dst: Reg, constant: i32) -> &mut Self {
        self.emit(CLASS_ALU | op, dst as u8, 0, 0, constant)
    }

    /// `dst = *(src + offset)`
    pub(super) fn load(&mut self, width: Width, dst: Reg, src: Reg, offset: i16) -> &mut Self {
        self.emit(CLASS_LOAD | MODE_MEMORY | width as u8, dst as u8, src as u8, offset, 0)
    }

    /// `*(dst + offset) = src`
    pub(super) fn store(&mut self, width: Width, dst: Reg, offset: i16, src: Reg) -> &mut Self {
        self.emit(CLASS_STORE | MODE_MEMORY | width as u8, dst as u8, src as u8, offset, 0)
    }

    /// `*(dst + offset) = constant`
    pub(super) fn store_constant(&mut self, width: Width, dst: Reg, offset: i16, constant: i32) -> &mut Self {
        self.emit(CLASS_STORE_CONSTANT | MODE_MEMORY | width as u8, dst as u8, 0, offset, constant)
    }

    /// `dst =` the map of the descriptor `fd`
    pub(super) fn load_map(&mut self, dst: Reg, fd: i32) -> &mut Self {
        self.emit(CLASS_LOAD_CONSTANT | DOUBLE_WORD, dst as u8, PSEUDO_MAP, 0, fd).emit(0, 0, 0, 0, 0)
    }

    /// `dst = src`
    pub(super) fn copy(&mut self, dst: Reg, src: Reg) -> &mut Self {
        self.emit(CLASS_ALU | MOVE | FROM_REGISTER, dst as u8, src as u8, 0, 0)
    }

    /// `dst = constant`
    pub(super) fn set(&mut self, dst: Reg, constant: i32) -> &mut Self {
        self.alu(MOVE, dst, constant)
    }

    /// `dst += constant`
    pub(super) fn add(&mut self, dst: Reg, constant: i32) -> &mut Self {
        self.alu(ADD, dst, constant)
    }

    /// `dst += src`
    pub(super) fn add_register(&mut self, dst: Reg, src: Reg) -> &mut Self {
        self.emit(CLASS_ALU | ADD | FROM_REGISTER, dst as u8, src as u8, 0, 0)
    }

    /// `dst |= constant`
    pub(super) fn or(&mut self, dst: Reg, constant: i32) -> &mut Self {
        self.alu(OR, dst, constant)
    }

    /// `dst &= constant`
    pub(super) fn and(&mut self, dst: Reg, constant: i32) -> &mut Self {
        self.alu(AND, dst, constant)
    }

    /// `dst <<= bits`
    pub(super) fn shift_left(&mut self, dst: Reg, bits: i32) -> &mut Self {
        self.alu(SHIFT_LEFT, dst, bits)
    }

    /// `dst >>= bits`
    pub(super) fn shift_right(&mut self, dst: Reg, bits: i32) -> &mut Self {
        self.alu(SHIFT_RIGHT, dst, bits)
    }

    /// Makes a label that is not yet placed.
    pub(super) fn label(&mut self) -> Label {
        self.labels.push(None);
        Label(self.labels.len() - 1)
    }

    /// Places `label` at the next instruction.
    pub(super) fn place(&mut self, label: Label) -> &mut Self {
        self.labels[label.0] = Some(self.code.len());
        self
    }

    /// Jumps to `to`.
    pub(super) fn jump(&mut self, to: Label) -> &mut Self {
        self.jumps.push((self.code.len(), to));
        self.emit(CLASS_JUMP, 0, 0, 0, 0)
    }

    /// Jumps to `to` if the condition holds for the lower 32 bits of `left` and `right`.
    pub(super) fn jump_if(&mut self, left: Reg, cond: Cond, right: u32, to: Label) -> &mut Self {
        self.jumps.push((self.code.len(), to));
        self.emit(CLASS_JUMP_32 | cond as u8, left as u8, 0, 0, right as i32)
    }

    /// Jumps to `to` if the condition holds for all 64 bits of `left` and `right`. This is for
    /// addresses.
    pub(super) fn jump_if_register(&mut self, left: Reg, cond: Cond, right: Reg, to: Label) -> &mut Self {
        self.jumps.push((self.code.len(), to));
        self.emit(CLASS_JUMP | cond as u8 | FROM_REGISTER, left as u8, right as u8, 0, 0)
    }

    /// `R0 = helper(R1, R2, ..)`
    pub(super) fn call(&mut self, helper: Helper) -> &mut Self {
        self.emit(CLASS_JUMP | CALL, 0, 0, 0, helper as i32)
    }

    /// `R0 = function(R1, R2, ..)`, where `function` is a number in the BTF of the kernel itself.
    pub(super) fn call_kernel_function(&mut self, function: u32) -> &mut Self {
        self.emit(CLASS_JUMP | CALL, 0, PSEUDO_KERNEL_FUNCTION, 0, function as i32)
    }

    /// Returns R0.
    pub(super) fn exit(&mut self) -> &mut Self {
        self.emit(CLASS_JUMP | EXIT, 0, 0, 0, 0)
    }

    /// The instructions, in the form of `bpf(2)`. `None` if a jump is longer than 32767
    /// instructions, goes back, or goes to a label that was never placed.
    pub(super) fn finish(mut self) -> Option<Vec<u64>> {
        for (at, label) in self.jumps {
            let distance = self.labels[label.0]?.checked_sub(at + 1)?;
            self.code[at] |= u64::from(i16::try_from(distance).ok()? as u16) << 16;
        }
        Some(self.code)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// The expected words are as in the kernel's documentation of the instruction set.
    #[test]
    fn instructions_are_encoded() {
        let mut asm = Asm::default();
        let end = asm.label();
        asm.load(Width::Half, Reg::R5, Reg::R2, 12)
            .load_map(Reg::R1, 7)
            .copy(Reg::R6, Reg::R1)
            .add(Reg::R4, -14)
            .jump_if(Reg::R5, Cond::NotEqual, 0xffff_0800, end)
            .jump_if_register(Reg::R4, Cond::Above, Reg::R3, end)
            .call(Helper::RedirectMap)
            .place(end)
            .exit()
            .store_constant(Width::Double, Reg::R10, -8, -1)
            .store(Width::Word, Reg::R10, -12, Reg::R7)
            .or(Reg::R7, 4)
            .call_kernel_function(0x1_0282);
        let expected: [u64; 13] = [
            0x0000_0000_000c_2569,
            0x0000_0007_0000_1118,
            0,
            0x0000_0000_0000_16bf,
            0xffff_fff2_0000_0407,
            0xffff_0800_0002_0556,
            0x0000_0000_0001_342d,
            0x0000_0033_0000_0085,
            0x0000_0000_0000_0095,
            0xffff_ffff_fff8_0a7a,
            0x0000_0000_fff4_7a63,
            0x0000_0004_0000_0747,
            0x0001_0282_0000_2085,
        ];
        assert_eq!(asm.finish().unwrap(), expected);
    }

    #[test]
    fn jumps_go_forward_and_not_too_far() {
        let jump_over = |exits: usize| {
            let mut asm = Asm::default();
            let end = asm.label();
            asm.jump(end);
            for _ in 0..exits {
                asm.exit();
            }
            asm.place(end).exit();
            asm.finish()
        };
        assert!(jump_over(32767).is_some());
        assert!(jump_over(32768).is_none());
        let mut back = Asm::default();
        let start = back.label();
        back.place(start).jump(start);
        assert!(back.finish().is_none());
        let mut nowhere = Asm::default();
        let label = nowhere.label();
        nowhere.jump(label);
        assert!(nowhere.finish().is_none());
    }
}
