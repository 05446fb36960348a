# A guest of QEMU that checks its memory, booted by multiboot(1): it fills SIZE bytes, each word with
# its address and the round combined; checks and rewrites all in each round; and prints the round to
# the first serial port, or the address of a word that differs, and stops.

.set FIRST, 0x400000
.set SIZE, 32 << 20
.set MAGIC, 0x1badb002
.set PORT, 0x3f8

        .section .text, "ax"
        .long MAGIC, 0, -MAGIC

        .globl _start
_start:
        mov $stack, %esp
        xor %ebx, %ebx
        mov $FIRST, %edi
fill:   mov %edi, (%edi)
        add $4, %edi
        cmp $FIRST + SIZE, %edi
        jne fill

round:  mov $FIRST, %edi
        lea 1(%ebx), %edx
word:   mov %edi, %eax
        xor %ebx, %eax
        cmp %eax, (%edi)
        jne differs
        mov %edi, %eax
        xor %edx, %eax
        mov %eax, (%edi)
        add $4, %edi
        cmp $FIRST + SIZE, %edi
        jne word
        inc %ebx
        mov $passed, %esi
        mov %ebx, %ebp
        call line
        jmp round

differs:
        mov $failed, %esi
        mov %edi, %ebp
        call line
stop:   hlt
        jmp stop

# Prints the string at esi, ebp in hexadecimal, and a newline.
line:   lodsb
        test %al, %al
        jz number
        call byte
        jmp line
number: mov $8, %ecx
digit:  rol $4, %ebp
        mov %ebp, %eax
        and $15, %eax
        mov digits(%eax), %al
        call byte
        loop digit
        mov $'\n', %al
# Prints the byte in al once the port has room for it.
byte:   mov %al, %ah
        mov $PORT + 5, %dx
busy:   in %dx, %al
        test $0x20, %al
        jz busy
        mov $PORT, %dx
        mov %ah, %al
        out %al, %dx
        ret

passed: .asciz "round "
failed: .asciz "differs at "
digits: .ascii "0123456789abcdef"

        .bss
        .skip 256
stack:
