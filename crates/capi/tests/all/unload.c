/* The library stays when a program that has loaded it closes it: threads have restartable
 * sequences and destructors in it. This program calls nothing of it by name, so that nothing else
 * keeps it. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int main(void) {
    void *library = dlopen("libnetmem.so.0", RTLD_NOW);
    void *symbol = library == NULL ? NULL : dlsym(library, "netmem_status_name");
    const char *(*name)(int) = NULL;
    memcpy(&name, &symbol, sizeof name);
    if (symbol == NULL || dlclose(library) != 0) {
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
