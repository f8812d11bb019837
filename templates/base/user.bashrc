# ~/.bashrc of the base template: yours to fill. Keep what is before the `case` free of forks.
case $- in *i*) ;; *) return ;; esac

alias ll='ls -l'
