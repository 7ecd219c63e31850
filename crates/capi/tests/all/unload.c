/* The library stays when a program that has loaded it closes it: threads have restartable
 * sequences in it, and a handler of signals. Where there are sequences, the library stays by their
 * pin, too, so its flag is read. This program calls nothing of it by name, so that nothing else
 * keeps it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

static int has_flag(void *library) {
    struct link_map *map = NULL;
    if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) {
        return 0;
    }
    for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_FLAGS_1) {
            return (entry->d_un.d_val & DF_1_NODELETE) != 0;
        }
    }
    return 0;
}

int main(void) {
    void *library = dlopen("libnetmem.so.0", RTLD_NOW);
    void *symbol = library == NULL ? NULL : dlsym(library, "netmem_status_name");
    const char *(*name)(int) = NULL;
    memcpy(&name, &symbol, sizeof name);
    if (symbol == NULL) {
        puts(dlerror());
        return 1;
    }
    if (!has_flag(library)) {
        puts("without restartable sequences, it can be unloaded");
        return 1;
    }
    if (dlclose(library) != 0) {
        puts(dlerror());
        return 1;
    }
    if (dlopen("libnetmem.so.0", RTLD_NOW | RTLD_NOLOAD) == NULL) {
        puts("it was unloaded");
        return 1;
    }
    puts(name(0));
    return 0;
}
